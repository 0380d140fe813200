"""Faults that attention operators have had in public, each kind as a test of ours."""

import gc
import itertools
import weakref

import cases
import pytest
import torch
from compare import GRADIENT, OUTPUT, assert_close, assert_exact
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attention_ops
from attention_ops import masks, reference

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def double(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


def agree(tensors: dict[str, Tensor], **options: object) -> Tensor:
    """Values and gradients equal those of the formula, in float64; returns out."""
    out = attention_ops.attention(**tensors, **options)
    exact = reference.attention(**tensors, **options)
    grad = torch.randn_like(out)
    assert_exact(out, exact, "out")
    leaves = [t for t in tensors.values() if t.requires_grad]
    ours, wanted = (torch.autograd.grad(x, leaves, grad) for x in (out, exact))
    for name, a, b in zip(tensors, ours, wanted, strict=False):
        assert_exact(a, b, name)
    return out


@pytest.mark.parametrize("as_bias", [False, True])
def test_padding_rows_of_a_mask_are_zero(as_bias):
    visible = torch.ones(6, 10).tril().bool()
    visible[5] = False
    tensors = {"query": double(1, 2, 6, 8), "key": double(1, 2, 10, 8), "value": double(1, 2, 10, 8)}
    if as_bias:
        tensors["bias"] = torch.zeros(6, 10, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    out = agree(tensors, **({} if as_bias else {"mask": visible}))
    assert torch.equal(out[:, :, 5], torch.zeros(1, 2, 8))


def test_two_masks_that_together_empty_a_row():
    """Padding and a band are harmless alone; the loss leaves the emptied row out, and gradients stay finite."""
    weight = torch.randn(3, 1, 1, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 1, 4, 1, dtype=torch.float64)
    query, key, value = (x @ w for w in weight)
    mask = masks.padding(torch.tensor([4, 2])) & masks.sliding_window(1, 0)
    attention_ops.attention(query, key, value, mask=mask)[1, :, :2].sum().backward()
    grad, weight.grad = weight.grad, None
    query, key, value = (x[1:, :, :2] @ w for w in weight)
    reference.attention(query, key, value, mask=masks.sliding_window(1, 0)).sum().backward()
    assert_exact(grad, weight.grad)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_of_the_lowest_finite_number_is_the_mean(dtype):
    lowest = torch.finfo(dtype).min
    bias = torch.tensor([[lowest] * 3, [1] * 3, [1] * 3], dtype=dtype)[None, None]
    query, key, value = (torch.rand(1, 1, 3, 4).to(dtype) for _ in range(3))
    out = attention_ops.attention(query, key, value, bias=bias)
    assert out.isfinite().all()
    if dtype != torch.float16:  # whose lowest number is small enough for float32 not to absorb the scores
        mean = value.double().mean(2)[0, 0]
        torch.testing.assert_close(out[0, 0, 0].double(), mean, atol=torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("junk", [1e4, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", ["dense", "padding", "bias", "ranges", "document"])
def test_what_stands_at_a_masked_place_is_never_read(kind, junk, dtype):
    """Bitwise the same outputs and gradients, whatever a key and a value hold that nobody may see."""
    lengths, visible = torch.tensor([70, 100]), torch.ones(2, 1, 1, 130).bool()
    visible[0, ..., 70:], visible[1, ..., 100:] = False, False
    ends = lengths[:, None, None].expand(2, 1, 130)
    options = {
        "dense": {"mask": visible},
        "padding": {"mask": masks.padding(lengths)},
        "bias": {"bias": torch.zeros(2, 1, 1, 130, dtype=dtype).masked_fill(~visible, -torch.inf)},
        "ranges": {"mask": masks.ranges(torch.zeros_like(ends), ends)},
        "document": {"mask": masks.document((torch.arange(130) >= lengths[:, None]).long()) & masks.padding(lengths)},
    }[kind]
    results = []
    for stored in (0.5, junk):
        torch.manual_seed(1)
        query, key, value = (torch.randn(2, 2, 130, 20).to(dtype) for _ in range(3))
        hidden = ~visible[:, :, 0, :, None]
        key, value = (t.masked_fill(hidden, stored).requires_grad_() for t in (key, value))
        query.requires_grad_()
        out, lse = attention_ops.attention(query, key, value, **options, return_lse=True)
        seen = out.float().sum() + lse.masked_fill(lse.isneginf(), 0).sum()
        grads = torch.autograd.grad(seen, (query, key, value))
        assert not grads[1].masked_select(hidden).any()
        assert not grads[2].masked_select(hidden).any()
        weights = attention_ops.attention_weights(query, key, **options).detach()
        summaries = [s.detach() for s in attention_ops.attention_summaries(query, key, **options)]
        results.append([out.detach(), lse.detach(), *grads, weights, *summaries])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_reaches_exactly_the_rows_that_see_it(place):
    tensors = {name: torch.randn(1, 1, 100, 8) for name in ("query", "key", "value")}
    clean = attention_ops.attention(**tensors, mask="causal")
    tensors[place][0, 0, 40] = torch.nan
    out = attention_ops.attention(**tensors, mask="causal")
    touched = torch.arange(100) >= 40 if place != "query" else torch.arange(100) == 40
    assert out[0, 0, touched].isnan().all()
    assert torch.equal(out[0, 0, ~touched], clean[0, 0, ~touched])


@pytest.mark.parametrize("place", ["key", "value"])
def test_nan_reaches_only_the_query_gradients_of_rows_that_see_it(place):
    tensors = {name: torch.randn(1, 1, 100, 8) for name in ("query", "key", "value")}
    grads = []
    for junk in (0.5, torch.nan):
        tensors[place][0, 0, 40] = junk
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        attention_ops.attention(**leaves, mask="causal").square().sum().backward()
        grads.append(leaves["query"].grad)
    assert torch.equal(grads[0][:, :, :40], grads[1][:, :, :40])
    assert grads[1][:, :, 40:].isnan().all()


def test_causal_shows_the_past_and_blocked_turns_the_other_convention():
    value = torch.eye(4)[None, None]
    out = attention_ops.attention(torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2), value, mask="causal")
    assert torch.equal(out[0, 0, 0], value[0, 0, 0])
    assert torch.equal(out[0, 0] > 0, torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize(("queries", "keys", "counts"), [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2])])
def test_causal_aligns_the_last_query_with_the_last_key(queries, keys, counts):
    query, key = torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    out = attention_ops.attention(query, key, torch.eye(keys)[None, None], mask="causal")[0, 0]
    assert (out > 0).sum(-1).tolist() == counts
    corner = attention_ops.attention(query, key, torch.eye(keys)[None, None], mask="causal(upper_left)")[0, 0]
    assert (corner > 0).sum(-1).tolist() == [min(i + 1, keys) for i in range(queries)]


@pytest.mark.parametrize("steps", [(6,), (3, 1, 1, 1), (1,) * 6])
@pytest.mark.parametrize("padding", [0, 2])
def test_steps_with_a_cache_equal_one_call(steps, padding):
    """Causal steps over a growing cache, the first places of which are padding on the left."""
    query, key, value = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind(0)
    real = masks.dense(torch.arange(6) >= padding)
    wanted = reference.attention(query, key, value, mask=masks.causal() & real)
    parts, done = [], 0
    for step in steps:
        end = done + step
        mask = masks.causal() & masks.dense(torch.arange(end) >= padding)
        parts.append(attention_ops.attention(query[:, :, done:end], key[:, :, :end], value[:, :, :end], mask=mask))
        done = end
    assert_exact(torch.cat(parts, 2), wanted)


@pytest.mark.parametrize("change", ["transposed", "sliced", "stepped", "expanded", "flipped"])
def test_incoming_gradient_of_any_strides(change):
    query, key, value = double(1, 4, 32, 128), double(1, 1, 32, 128), double(1, 1, 32, 128)
    out = attention_ops.attention(query, key, value)
    if change == "flipped":
        grad = torch.randn(1, 4, 32, 128, dtype=torch.float64).flip(-1)
    else:
        grad = cases.strided((1, 4, 32, 128), torch.float64, change)
    leaves = (query, key, value)
    strided = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for a, b in zip(strided, torch.autograd.grad(out, leaves, grad.clone().contiguous()), strict=True):
        assert torch.equal(a, b)


def test_gradient_of_a_sum_has_no_strides():
    leaves = [torch.randn(2, 3, 17, 16, requires_grad=True) for _ in range(3)]
    out = attention_ops.attention(*leaves)
    summed = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for a, b in zip(summed, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cut", [lambda t: t[:, :, :-32], lambda t: t[:, :, ::2], lambda t: t[:, :, 7:, 3:]])
def test_slices_of_longer_tensors(cut):
    whole = [torch.randn(1, 4, 160, 16, requires_grad=True) for _ in range(3)]
    attention_ops.attention(*(cut(t) for t in whole)).square().sum().backward()
    copies = [cut(t.detach()).clone().requires_grad_() for t in whole]
    attention_ops.attention(*copies).square().sum().backward()
    for tensor, copy in zip(whole, copies, strict=True):
        assert torch.equal(cut(tensor.grad), copy.grad)
        assert tensor.grad.count_nonzero() == copy.grad.count_nonzero()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 43, 63, 65])
@pytest.mark.parametrize("kind", ["contiguous", "sliced", "expanded", "transposed"])
def test_bias_with_rows_of_any_length(length, kind):
    base = double(2, 2, length, length + 5)
    bias = {
        "contiguous": lambda: base[..., :length].contiguous(),
        "sliced": lambda: base[..., 2 : length + 2],
        "expanded": lambda: base[:1, :1, :, :length].expand(2, 2, length, length),
        "transposed": lambda: base[..., :length].mT,
    }[kind]()
    tensors = {"query": double(2, 2, length, 8), "key": double(2, 2, length, 8), "value": double(2, 2, length, 8)}
    agree({**tensors, "bias": bias})
    grads = [
        torch.autograd.grad(f(**tensors, bias=bias).square().sum(), base)[0]
        for f in (attention_ops.attention, reference.attention)
    ]
    assert_exact(*grads)


def test_columns_beyond_64_decide():
    query, key = torch.zeros(1, 1, 1, 257), torch.zeros(1, 1, 2, 257)
    for column in range(257):
        query.zero_(), key.zero_()
        query[..., column], key[0, 0, 1, column] = 10, 10
        weights = attention_ops.attention_weights(query, key, scale=1.0)
        assert weights[0, 0, 0, 1] > 0.99, column


@pytest.mark.parametrize(("width", "value_width"), [(8, 16), (16, 8), (8, 1), (1, 8), (3, 200)])
def test_value_width_unlike_key_width(width, value_width):
    agree({"query": double(1, 2, 9, width), "key": double(1, 2, 11, width), "value": double(1, 2, 11, value_width)})


@pytest.mark.parametrize("size", [(65537, 1, 2, 4), (1, 65537, 2, 4)], ids=str)
def test_more_than_65536_batches_and_heads(size):
    tensors = {name: torch.randn(size, requires_grad=True) for name in ("query", "key", "value")}
    out = attention_ops.attention(**tensors)
    exact = reference.attention(**tensors)
    torch.testing.assert_close(out, exact)
    grads = [torch.autograd.grad(x.square().sum(), list(tensors.values())) for x in (out, exact)]
    torch.testing.assert_close(*grads)


def test_offsets_past_32_bits():
    """A view whose last head begins more than 2^31 elements into its storage, of which few pages are ever touched."""
    stride = 2**30 + 12345
    storage = torch.empty(2 * stride + 4096, dtype=torch.bfloat16)
    query = torch.as_strided(storage, (1, 3, 8, 16), (0, stride, 16, 1))
    query.copy_(torch.randn(1, 3, 8, 16))
    copy = query.clone()
    assert torch.equal(attention_ops.attention(query, query, query), attention_ops.attention(copy, copy, copy))


@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (8, 8), (33, 3)], ids=str)
def test_gradients_of_shared_heads_are_summed(heads):
    agree({"query": double(2, heads[0], 5, 4), "key": double(2, heads[1], 6, 4), "value": double(2, heads[1], 6, 4)})


@pytest.mark.parametrize("names", [s for n in range(1, 5) for s in itertools.combinations(range(4), n)], ids=str)
def test_gradients_when_few_are_needed(names):
    """Only the bias, for one: statistics must be kept for it too."""
    sizes = {"query": (1, 2, 5, 4), "key": (1, 2, 6, 4), "value": (1, 2, 6, 4), "bias": (1, 1, 5, 6)}
    tensors = {name: double(*size).requires_grad_(n in names) for n, (name, size) in enumerate(sizes.items())}
    tensors = {name: t if t.requires_grad else t.detach() for name, t in tensors.items()}
    out = attention_ops.attention(**tensors)
    wanted = [t for t in tensors.values() if t.requires_grad]
    ours = torch.autograd.grad(out.square().sum(), wanted)
    exact = torch.autograd.grad(reference.attention(**tensors).square().sum(), wanted)
    for a, b in zip(ours, exact, strict=True):
        assert_exact(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_mask(reentrant):
    tensors = [torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3)]

    def layer(*args: Tensor) -> Tensor:
        return attention_ops.attention(*args, dropout_p=0.3)

    grads = []
    for function in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=reentrant)):
        torch.manual_seed(4)
        function(*tensors).square().sum().backward()
        grads.append([t.grad for t in tensors])
        for t in tensors:
            t.grad = None
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.every_isa
def test_scores_beyond_the_range_of_half():
    query = torch.full((1, 1, 5, 128), 256.0, dtype=torch.float16)
    value = torch.randn(1, 1, 5, 128, dtype=torch.float16)
    out, lse = attention_ops.attention(query, query, value, return_lse=True)
    torch.testing.assert_close(out, value.float().mean(2, keepdim=True).half().expand_as(out), atol=1e-3, rtol=1e-3)
    assert lse.isfinite().all()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1e4, 1e6, -1e6])
def test_huge_logits_with_one_winner(size, dtype):
    query = torch.eye(70).to(dtype)[None, None].requires_grad_()
    key = torch.eye(70).to(dtype)[None, None].requires_grad_()
    winner = torch.eye(70) if size > 0 else (torch.ones(70, 70) - torch.eye(70)) / 69
    out = attention_ops.attention(query, key, torch.eye(70).to(dtype)[None, None], scale=size)
    torch.testing.assert_close(out[0, 0].float(), winner, atol=torch.finfo(dtype).eps, rtol=0)
    if size > 0:
        out.backward(torch.randn_like(out))
        assert not query.grad.any()
        assert not key.grad.any()


@pytest.mark.parametrize("bias_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_of_bias_with_every_type_of_query(dtype, bias_dtype):
    query, key, value = (torch.randn(1, 2, 6, 8).to(dtype) for _ in range(3))
    bias = torch.randn(1, 2, 6, 6).to(bias_dtype).requires_grad_()
    if bias_dtype not in (dtype, torch.float32):
        with pytest.raises(TypeError, match="expected bias dtype"):
            attention_ops.attention(query, key, value, bias=bias)
        return
    out = attention_ops.attention(query, key, value, bias=bias)
    exact = reference.attention(query.double(), key.double(), value.double(), bias=bias.double())
    plain = reference.attention(query, key, value, bias=bias.to(dtype))
    assert_close(out.detach(), plain.detach(), exact.detach(), OUTPUT)
    grads = [torch.autograd.grad(x.double().square().sum(), bias)[0] for x in (out, plain, exact)]
    assert grads[0].dtype == bias_dtype
    assert_close(*grads, GRADIENT)


@pytest.mark.parametrize("window", [1, 2, 4, 10, 12])
def test_a_window_counts_itself(window):
    query, value = torch.randn(1, 1, 10, 4), torch.eye(10)[None, None]
    out = attention_ops.attention(query, query, value, mask=masks.sliding_window(window - 1, 0))
    assert (out[0, 0] > 0).sum(-1).tolist() == [min(i + 1, window) for i in range(10)]
    if window == 1:
        assert torch.equal(out, value)
    if window >= 10:
        assert torch.equal(out, attention_ops.attention(query, query, value, mask="causal"))


@pytest.mark.parametrize("length", [15, 16, 17, 33, 129])
def test_block_mask_together_with_a_bias(length):
    blocks = -(-length // 16)
    layout = torch.ones(blocks, blocks).tril().bool()
    distance = torch.arange(length, dtype=torch.float64)
    bias = (distance[None] - distance[:, None])[None, None].requires_grad_()
    tensors = {"query": double(1, 2, length, 8), "key": double(1, 2, length, 8), "value": double(1, 2, length, 8)}
    agree({**tensors, "bias": bias}, mask=masks.block_sparse(layout, 16) & masks.causal())


def test_asking_for_weights_keeps_the_mask():
    query, value = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    weights = attention_ops.attention_weights(query, query, mask="causal")
    assert not weights.triu(1).any()
    torch.testing.assert_close(weights @ value, attention_ops.attention(query, query, value, mask="causal"))


@pytest.mark.parametrize("size", [(2, 4, 3, 3), (1, 4, 3, 3), (2, 1, 3, 3), (3, 3), (3,), (1, 1, 1, 3)], ids=str)
def test_training_and_evaluation_agree_for_every_mask_shape(size):
    query, mask = torch.randn(2, 4, 3, 8), torch.rand(size) < 0.8
    training = attention_ops.attention(query.clone().requires_grad_(), query, query, mask=mask)
    with torch.inference_mode():
        assert torch.equal(training, attention_ops.attention(query, query, query, mask=mask))


def test_twenty_runs_are_bitwise_equal():
    leaves = [torch.randn(2, 4, 150, 32, requires_grad=True) for _ in range(3)]

    def once() -> list[Tensor]:
        out = attention_ops.attention(*leaves, mask="causal")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    first = once()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_graphs_that_are_never_used_are_freed():
    def once() -> weakref.ref:
        leaf = torch.randn(1, 1, 4, 4, requires_grad=True)
        out, lse = attention_ops.attention(leaf, leaf, leaf, dropout_p=0.1, return_lse=True)
        assert out.grad_fn is not None
        out.keep, lse.keep = lse, None
        return weakref.ref(leaf)

    gc.disable()
    try:
        assert not any(once()() is not None for _ in range(200))
    finally:
        gc.enable()
