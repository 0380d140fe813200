"""The CUDA kernels of the weights and of their summaries: on the model that runs them without a GPU, and on a GPU."""

import itertools
import math

import cases
import pytest
import test_attention_weights as on_the_processor
import test_masks
import torch
from backends import HAS_GPU, assert_replays, less_memory_than, on_model
from compare import assert_exact
from torch import Tensor

from attention_ops import attention_summaries, attention_weights, masks, reference

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def is_small(case: cases.Case) -> bool:
    """Whether it takes the model about a second at most."""
    shape = case.shape
    tiles = (-(-length // 64) for length in (shape.queries, shape.keys))
    return shape.batch * shape.heads * math.prod(tiles) <= 8


CASES = on_the_processor.NO_DROPOUT
SMALL = [case for case in CASES if is_small(case)]
SELECTED = list(zip(SMALL[1::4], itertools.cycle(range(8)), strict=False))


@pytest.mark.parametrize("case", SMALL[::4], ids=str)
def test_weights(case, device):
    on_the_processor.check_weights(case, device)


@pytest.mark.parametrize(("case", "selection"), SELECTED, ids=str)
def test_weights_of_some_heads_and_rows(case, selection, device):
    on_the_processor.check_selection(case, on_the_processor.selections(case)[selection], device)


@pytest.mark.parametrize("case", [case for case in SMALL if on_the_processor.no_ties(case)][::2], ids=str)
def test_summaries(case, device):
    on_the_processor.check_summaries(case, device)


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_whole_grid(case):
    on_the_processor.check_weights(case, "cuda")
    for selection in on_the_processor.selections(case):
        on_the_processor.check_selection(case, selection, "cuda")
    if on_the_processor.no_ties(case):
        on_the_processor.check_summaries(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_summaries_of_half_types(dtype, device):
    on_the_processor.check_half_summaries("causal", dtype, device)


@pytest.mark.parametrize(("queries", "keys"), [(1, 100), (17, 65), (65, 17), (100, 1), (65, 65), (17, 17)])
def test_sizes(queries, keys, device):
    case = cases.Case(cases.Shape(1, 2, 1, queries, keys, 17, 1), mask="window", bias="bias_keys", strides="stepped")
    on_the_processor.check_weights(case, device)
    on_the_processor.check_summaries(case, device)


@pytest.mark.parametrize("name", [*cases.KINDS, *cases.SQUARE_KINDS, *cases.BOTH])
def test_every_mask(name, device):
    shape = cases.Shape(2, 2, 1, 33, 33 if name in cases.SQUARE_KINDS else 50, 8, 1)
    case = cases.Case(shape, mask=name, sinks=True)
    on_the_processor.check_selection(case, on_the_processor.selections(case)[3], device)
    on_the_processor.check_summaries(case, device)


@pytest.mark.parametrize("name", test_masks.BOOLEAN)
def test_any_byte_but_zero_is_true(name, device):
    test_masks.check_bytes(name, device)


@pytest.mark.parametrize("name", ["document", "window|dilated&causal", "block_sparse"])
def test_masks_over_several_tiles(name, device):
    shape = cases.Shape(1, 2, 1, 100, 100 if name in cases.SQUARE_KINDS else 140, 8, 1)
    case = cases.Case(shape, mask=name, bias="bias_inf", strides="transposed")
    on_the_processor.check_weights(case, device)
    on_the_processor.check_summaries(case, device)


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape, device):
    case = cases.Case(shape, mask="padding", bias="bias", sinks=True)
    on_the_processor.check_weights(case, device)
    on_the_processor.check_summaries(case, device)
    query, none = torch.randn(2, 2, 5, 4, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    assert attention_weights(query, query, heads=none).shape == (2, 0, 5, 5)
    assert attention_weights(query, query, rows=none).shape == (2, 2, 0, 5)


@pytest.mark.parametrize("names", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_gradcheck(names, device):
    sizes = ((1, 2, 3, 2), (1, 1, 4, 2), (1, 2, 3, 4), (2,))
    tensors = [
        torch.randn(size, dtype=torch.float64).to(device).requires_grad_(n in names) for n, size in enumerate(sizes)
    ]

    def function(query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        options = {"bias": bias, "sinks": sinks, "mask": "causal", "softcap": 1.5}
        return attention_weights(query, key, **options), *attention_summaries(query, key, **options)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=device == "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_lse_is_an_input(dtype, device):
    """Rows are weighed by the lse that is given, and only those whose lse is large are counted again."""
    op = torch.ops.attention_ops._attention_weights
    query, key = torch.randn(1, 1, 3, 4, dtype=dtype), torch.randn(1, 1, 5, 4, dtype=dtype)
    query[0, 0, 2] *= 1e5
    key[..., 0] = 1
    lse = reference.attention(query, key, key, scale=1.0, return_lse=True)[1] + torch.tensor([0.5, 0, 0], dtype=dtype)
    given = (t.to(device) for t in (query, key, key[..., :0]))
    weights = op(*given, None, None, None, [], "", 1.0, 0.0, 0.0, None, lse.to(device), None, None, 3, False).cpu()
    share = torch.tensor([torch.tensor(-0.5).exp().item(), 1, 1], dtype=dtype)
    torch.testing.assert_close(weights[0, 0].sum(-1), share, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("fill", [-1e4, "lowest", "highest"])
def test_a_row_of_one_huge_number_weighs_its_keys_alike(fill, sink, dtype, device):
    info = torch.finfo(dtype)
    fill = {"lowest": info.min, "highest": info.max}.get(fill, fill)
    query, key = torch.zeros(1, 1, 5, 8, dtype=dtype, device=device), torch.randn(1, 1, 70, 8).to(dtype).to(device)
    bias = torch.full((1, 1, 5, 70), fill, dtype=dtype, device=device)
    sinks = torch.full((1,), fill, dtype=dtype, device=device) if sink else None
    share = torch.tensor(1 / (70 + sink), dtype=dtype)
    near = {"atol": 2 * info.eps, "rtol": 4 * info.eps}
    weights = attention_weights(query, key, bias=bias, sinks=sinks).cpu()
    torch.testing.assert_close(weights, share.expand_as(weights), **near)
    summaries = attention_summaries(query, key, bias=bias, sinks=sinks)
    torch.testing.assert_close(summaries.maximum[0, 0].cpu().to(dtype), share.expand(5), **near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_entropy_has_a_gradient_beside_the_lowest_number(dtype, device):
    query, key = (torch.randn(1, 1, n, 4, dtype=dtype).to(device).requires_grad_() for n in (3, 2))
    bias = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype).to(device).requires_grad_()
    entropy = attention_summaries(query, key, bias=bias).entropy
    for grad in torch.autograd.grad(entropy, (query, key, bias), torch.full_like(entropy, 7.0)):
        torch.testing.assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("place", [0, 3, 69])
def test_maximum_takes_the_first_of_equal_places(place, device):
    query, key = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 100, 2, dtype=torch.float64)
    bias = torch.zeros(1, 1, 1, 100, dtype=torch.float64)
    bias[..., :place] = -1
    there = bias.to(device).requires_grad_()
    attention_summaries(query.to(device), key.to(device), bias=there).maximum.sum().backward()
    weights = bias.softmax(-1)
    first = torch.arange(100) == place
    assert_exact(there.grad.cpu(), weights[..., place] * (first.double() - weights))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("junk", [float("nan"), float("inf")], ids=str)
def test_what_stands_at_a_hidden_place_is_never_read(junk, dtype, device):
    visible = torch.arange(70).expand(2, 1, 1, 70) < torch.tensor([66, 40])[:, None, None, None]
    mask, results = masks.padding(torch.tensor([66, 40], device=device)), []
    for stored in (0.5, junk):
        torch.manual_seed(1)
        query, key = torch.randn(2, 1, 20, 16).to(dtype), torch.randn(2, 1, 70, 16).to(dtype)
        key = key.masked_fill(~visible[:, :, 0, :, None], stored)
        leaves = [t.to(device).requires_grad_() for t in (query, key)]
        weights, summaries = attention_weights(*leaves, mask=mask), attention_summaries(*leaves, mask=mask)
        loss = weights.float().square().sum() + sum(x.sum() for x in summaries)
        results.append([weights.detach(), *(x.detach() for x in summaries), *torch.autograd.grad(loss, leaves)])
    for before, after in zip(*results, strict=True):
        assert after.isfinite().all()
        torch.testing.assert_close(before, after, rtol=0.02 if dtype.itemsize == 2 else 1e-5, atol=1e-2)
    assert not results[1][0].cpu().masked_select(~visible).any()


@pytest.mark.parametrize("place", ["query", "key"])
def test_nan_reaches_exactly_the_rows_that_see_it(place, device):
    tensors = {name: torch.randn(1, 1, 70, 8) for name in ("query", "key")}
    tensors[place][0, 0, 40] = torch.nan
    there = {name: t.to(device) for name, t in tensors.items()}
    touched = torch.arange(70) >= 40 if place == "key" else torch.arange(70) == 40
    weights = attention_weights(**there, mask="causal").cpu()[0, 0]
    assert torch.equal(weights.isnan().any(-1), touched)
    summaries = attention_summaries(**there, mask="causal")
    for rows in (summaries.entropy, summaries.maximum):
        assert torch.equal(rows.cpu()[0, 0].isnan(), touched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", [(1, 1, 1, True), (2, 2, 7, True)], ids=str)
def test_any_schedule_gives_the_same_bits(schedule, dtype):
    leaves = [torch.randn(1, 1, 100, 8).to(dtype).requires_grad_() for _ in range(2)]
    results = []
    for chosen in ((0, 0, 1, True), schedule):
        with on_model(*chosen):
            weights = attention_weights(*leaves, mask="sliding_window(70, 3)", average=True)
            summaries = attention_summaries(*leaves, mask="sliding_window(70, 3)")
            loss = weights.float().square().sum() + sum(x.square().sum() for x in summaries)
            results.append([weights, *summaries, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
@pytest.mark.parametrize("size", [(70000, 1, 2, 4), (1, 70000, 2, 4)], ids=str)
def test_many_batches_and_heads(size):
    leaves = [torch.randn(size, device="cuda", requires_grad=True) for _ in range(2)]
    for ours, exact in (
        ((attention_weights(*leaves),), (reference.attention_weights(*leaves),)),
        (attention_summaries(*leaves)[:2], reference.attention_summaries(*leaves)[:2]),
    ):
        torch.testing.assert_close(list(ours), list(exact))
        grads = [torch.autograd.grad(sum(x.square().sum() for x in results), leaves) for results in (ours, exact)]
        torch.testing.assert_close(*grads)


@needs_gpu
def test_memory_of_summaries_is_linear_in_the_length():
    leaves = [torch.randn(1, 1, 16384, 16, device="cuda", requires_grad=True) for _ in range(2)]
    with less_memory_than(32):
        sum(x.sum() for x in attention_summaries(*leaves, mask="causal", softcap=5.0)).backward()


@needs_gpu
def test_a_graph_replays():
    leaves = [torch.randn(2, 2, 100, 64, device="cuda", requires_grad=True) for _ in range(2)]
    rows = torch.tensor([3, 99, 4], device="cuda")

    def step() -> list[Tensor]:
        weights = attention_weights(*leaves, mask="causal", rows=rows)
        summaries = attention_summaries(*leaves, mask="causal")
        loss = weights.square().sum() + sum(x.square().sum() for x in summaries)
        return [weights, *summaries, *torch.autograd.grad(loss, leaves)]

    assert_replays(step, leaves)
