"""The CUDA kernels: one suite for the processor, for the model that runs them without a GPU, and for a GPU."""

import cases
import pytest
import test_attention
import torch
from backends import HAS_GPU, assert_replays, less_memory_than, on_model
from compare import assert_exact
from torch import Tensor

import attention_ops
from attention_ops import masks, reference

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


@pytest.mark.parametrize("case", cases.COMPACT, ids=str)
def test_values_and_gradients(case, device):
    test_attention.check(case, device)


@needs_gpu
@pytest.mark.parametrize("case", [c for c in cases.CASES if c not in cases.COMPACT], ids=str)
def test_the_rest_of_the_grid(case):
    test_attention.check(case, "cuda")


HALF_WIDTHS = [(torch.bfloat16, n) for n in (24, 72, 136, 257)] + [(torch.float16, n) for n in (64, 128, 256)]


@pytest.mark.parametrize(("dtype", "width"), HALF_WIDTHS, ids=str)
def test_widths_of_half_types(dtype, width, device):
    for mask in ("no_mask", "causal"):
        test_attention.check(cases.Case(cases.Shape(1, 2, 1, 70, 75, width, 8), dtype=dtype, mask=mask), device)
        test_attention.check(cases.Case(cases.Shape(1, 2, 1, 70, 75, 8, width), dtype=dtype, sinks=True), device)


@pytest.mark.parametrize("extra", [None, 2.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_shared_memory_of_the_smallest_blocks(width, extra):
    """99 KB, as of compute capabilities 8.6, 8.9 and 12.0."""
    with on_model(shared_kilobytes=99):
        shape = cases.Shape(1, 1, 1, 70, 75, width, 8)
        test_attention.check(cases.Case(shape, dtype=torch.bfloat16, mask="causal", softcap=extra))


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape, device):
    for dtype in (torch.float32, torch.bfloat16):
        test_attention.check(cases.Case(shape, mask="padding", bias="bias", sinks=True, dtype=dtype), device)


@pytest.mark.parametrize("name", [*cases.KINDS, *cases.SQUARE_KINDS, *cases.BOTH])
def test_every_mask(name, device):
    shape = cases.Shape(2, 2, 1, 70, 70 if name in cases.SQUARE_KINDS else 90, 8, 4)
    test_attention.check(cases.Case(shape, mask=name), device)


@pytest.mark.parametrize("bias", [name for name in cases.BIASES if name != "no_bias"])
def test_every_bias(bias, device):
    test_attention.check(cases.Case(cases.Shape(2, 2, 2, 65, 67, 8, 8), mask="causal", bias=bias), device)


def test_gradcheck(device):
    sizes = {"query": (2, 2, 3, 3), "key": (2, 1, 5, 3), "value": (2, 1, 5, 2), "bias": (1, 2, 3, 5), "sinks": (2,)}
    tensors = {n: torch.randn(s, dtype=torch.float64).to(device).requires_grad_() for n, s in sizes.items()}
    seed = torch.tensor([3], device=device)

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(tensors, args, strict=True))
        return attention_ops.attention(**named, mask="causal", softcap=1.5, dropout_p=0.25, seed=seed, return_lse=True)

    assert torch.autograd.gradcheck(function, list(tensors.values()), fast_mode=device == "cpu")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "junk"), [("dense", float("nan")), ("padding", float("inf")), ("bias", float("nan"))], ids=str
)
def test_what_stands_at_a_hidden_place_is_never_read(kind, junk, dtype, device):
    """Bitwise the same outputs and gradients, whatever a key and a value hold that nobody may see."""
    visible = torch.arange(80).expand(2, 1, 1, 80) < torch.tensor([70, 40])[:, None, None, None]
    options = {
        "dense": {"mask": masks.dense(visible.to(device))},
        "padding": {"mask": masks.padding(torch.tensor([70, 40], device=device))},
        "bias": {"bias": torch.zeros(2, 1, 1, 80, dtype=dtype).masked_fill(~visible, -torch.inf).to(device)},
    }[kind]
    results = []
    for stored in (0.5, junk):
        torch.manual_seed(1)
        query, key, value = (torch.randn(2, 2, 80, 16).to(dtype).to(device) for _ in range(3))
        hidden = ~visible[:, :, 0, :, None].to(device)
        leaves = [query, *(t.masked_fill(hidden, stored) for t in (key, value))]
        leaves = [t.requires_grad_() for t in leaves]
        out, lse = attention_ops.attention(*leaves, **options, return_lse=True)
        grads = torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
        assert not any(grad.masked_select(hidden).any() for grad in grads[1:])
        results.append([out.detach(), lse.detach(), *grads])
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(before, after, rtol=0.02 if dtype.itemsize == 2 else 1e-5, atol=1e-2)
        assert after.isfinite().all()


@pytest.mark.parametrize("place", ["query", "key"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nothing_hidden_reaches_a_gradient_through_a_softcap(place, dtype, device):
    """Also where no other gradient is asked for, whose pass would see that it is not a number."""
    tensors = {name: torch.randn(1, 1, 70, 8).to(dtype) for name in ("query", "key", "value")}
    tensors[place][0, 0, 65] = torch.nan
    leaves = {name: t.to(device).requires_grad_(name == place) for name, t in tensors.items()}
    lengths = torch.tensor([60], device=device)
    mask = masks.padding(queries=lengths) if place == "query" else masks.padding(lengths)
    attention_ops.attention(**leaves, mask=mask, softcap=2.0).sum().backward()
    grad = leaves[place].grad.cpu()
    assert grad[0, 0, :60].isfinite().all()
    assert not grad[0, 0, 60:].any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_scale_below_the_numbers_of_float32(dtype, device):
    query, key, value = (torch.randn(1, 1, 70, 8).to(dtype).to(device) for _ in range(3))
    out = attention_ops.attention(query, key, value, mask="causal", scale=1e-50).cpu().double()
    mean = value.cpu().double().cumsum(2) / torch.arange(1, 71)[:, None]
    torch.testing.assert_close(out, mean, atol=torch.finfo(dtype).eps * 4, rtol=torch.finfo(dtype).eps * 4)


def test_a_window_beyond_every_position(device):
    query, key = torch.randn(1, 1, 3, 4).to(device), torch.randn(1, 1, 9, 4).to(device)
    for mask in (masks.sliding_window(-(2**31), None), masks.sliding_window(None, -(2**31))):
        found = attention_ops.attention(query, key, key, mask=mask | masks.dilated(2))
        wanted = attention_ops.attention(query, key, key, mask=masks.dilated(2))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nan_reaches_exactly_the_rows_that_see_it(place, dtype, device):
    tensors = {name: torch.randn(1, 1, 70, 8).to(dtype) for name in ("query", "key", "value")}
    tensors[place][0, 0, 40] = torch.nan
    out = attention_ops.attention(**{name: t.to(device) for name, t in tensors.items()}, mask="causal").cpu()
    touched = torch.arange(70) >= 40 if place != "query" else torch.arange(70) == 40
    assert out[0, 0, touched].isnan().all()
    assert out[0, 0, ~touched].isfinite().all()


@pytest.mark.parametrize("p", [0.1, 1.0])
def test_dropout_is_that_of_the_formula(p, device):
    for seed in (torch.tensor([2**40 + 3]), torch.tensor([[5, 0], [2**40, 2**33 + 1]])):
        kept = attention_ops.dropout_mask(seed.to(device), 2, 3, 33, 71, p).cpu()
        assert torch.equal(kept, reference.dropout_mask(seed, 2, 3, 33, 71, p))
    query, value = torch.zeros(2, 3, 33, 4), torch.eye(71).expand(2, 3, 71, 71)
    out = attention_ops.attention(
        query.to(device), torch.zeros(2, 3, 71, 4, device=device), value.to(device), dropout_p=p, seed=seed.to(device)
    )
    assert torch.equal(out.cpu() != 0, kept)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fill", [-1e4, "lowest"])
def test_a_row_of_one_huge_number_weighs_its_keys_alike(fill, dtype, device):
    info = torch.finfo(dtype)
    fill = info.min if fill == "lowest" else fill
    query, key, value = torch.zeros(1, 1, 5, 8), torch.randn(1, 1, 70, 8), torch.randn(1, 1, 70, 6)
    query, key, value = (t.to(dtype).to(device).requires_grad_() for t in (query, key, value))
    bias = torch.full((1, 1, 5, 70), fill, dtype=dtype, device=device)
    attention_ops.attention(query, key, value, bias=bias).sum().backward()
    share = torch.full_like(value, 5 / 70)
    torch.testing.assert_close(value.grad, share, atol=2 * info.eps, rtol=4 * info.eps)


def check_huge_scores(many: int, dtype: torch.dtype, device: str) -> None:
    """Of 1e10: what rounding takes off one, as an exponent, is far beyond 2^128."""
    query, value = torch.full((1, 1, 70, 64), 30000.0).to(dtype), torch.randn(1, 1, 70, 64).to(dtype)
    key = query * torch.tensor([1.0, 0.5, 0.25])[torch.arange(70) % many, None].to(dtype)
    found, exact = (value.to(*to, copy=True).requires_grad_() for to in ((device,), (torch.float64,)))
    out, lse = attention_ops.attention(query.to(device), key.to(device), found, return_lse=True)
    wanted, wanted_lse = reference.attention(query.double(), key.double(), exact, return_lse=True)
    out.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(out.cpu().double(), wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=0, rtol=1e-6)
    torch.testing.assert_close(found.grad.cpu().double(), exact.grad, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_huge_scores(many, dtype, device):
    check_huge_scores(many, dtype, device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bitwise_equal_from_run_to_run(dtype, device):
    leaves = [torch.randn(1, 2, 150, 24).to(dtype).to(device).requires_grad_() for _ in range(3)]
    bias = torch.randn(1, 1, 1, 150, device=device).requires_grad_()

    def once() -> list[Tensor]:
        out = attention_ops.attention(*leaves, bias=bias, mask="causal")
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (*leaves, bias))]

    first = once()
    for _ in range(10 if device == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", [(1, 1, 1, True), (2, 2, 7, True), (2, 2, 8, False)], ids=str)
def test_any_schedule_gives_the_same_bits(schedule, dtype):
    """Threads and blocks in any order, copies late or at once."""
    leaves = [torch.randn(1, 2, 130, 16).to(dtype).requires_grad_() for _ in range(3)]
    results = []
    for chosen in ((0, 0, 1, True), schedule):
        with on_model(*chosen):
            out = attention_ops.attention(*leaves, mask="sliding_window(70, 3)")
            results.append([out.detach(), *torch.autograd.grad(out.float().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
@pytest.mark.parametrize("size", [(70000, 1, 2, 4), (1, 70000, 2, 4)], ids=str)
def test_many_batches_and_heads(size):
    leaves = [torch.randn(size, device="cuda", requires_grad=True) for _ in range(3)]
    out, exact = attention_ops.attention(*leaves), reference.attention(*leaves)
    torch.testing.assert_close(out, exact)
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, exact)]
    torch.testing.assert_close(*grads)


@needs_gpu
def test_offsets_past_32_bits():
    stride = 2**30 + 12345 * 8
    storage = torch.empty(2 * stride + 4096, dtype=torch.bfloat16, device="cuda")
    query = torch.as_strided(storage, (1, 3, 8, 16), (0, stride, 16, 1))
    query.copy_(torch.randn(1, 3, 8, 16))
    copy = query.clone()
    assert torch.equal(attention_ops.attention(query, query, query), attention_ops.attention(copy, copy, copy))


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_graph_replays_forward_and_backward(dtype):
    leaves = [torch.randn(2, 2, 100, 64, device="cuda").to(dtype).requires_grad_() for _ in range(3)]

    def step() -> list[Tensor]:
        out = attention_ops.attention(*leaves, mask="causal")
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    assert_replays(step, leaves)


@needs_gpu
def test_work_goes_to_the_current_stream():
    query = torch.randn(4, 8, 500, 64, device="cuda")
    wanted = attention_ops.attention(query, query, query)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = query + 0
        out = attention_ops.attention(late, late, late)
    stream.synchronize()
    assert torch.equal(out, wanted)


@needs_gpu
def test_autocast_computes_in_half():
    query = torch.randn(1, 2, 40, 32, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = attention_ops.attention(query, query, query)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert query.grad.dtype == torch.float32


@needs_gpu
def test_memory_is_linear_in_the_length():
    leaves = [torch.randn(1, 1, 16384, 16, device="cuda", requires_grad=True) for _ in range(3)]
    with less_memory_than(32):
        attention_ops.attention(*leaves, mask="causal", softcap=5.0).sum().backward()


@needs_gpu
def test_tensors_on_two_devices_are_refused():
    query = torch.randn(1, 1, 3, 4, device="cuda")
    with pytest.raises(ValueError, match="expected key device cuda:0 as in query, got cpu"):
        attention_ops.attention(query, query.cpu(), query)


def test_float64_is_exact(device):
    tensors = [torch.randn(1, 2, 70, 16, dtype=torch.float64) for _ in range(3)]
    out = attention_ops.attention(*(t.to(device) for t in tensors), mask="causal").cpu()
    assert_exact(out, reference.attention(*tensors, mask="causal"))
