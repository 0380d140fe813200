"""Masks: every kind and every pair of kinds, against dense predicates; which tiles are visited; rules of the values."""

import copy
import itertools
import pickle
import re

import cases
import pytest
import torch
from torch import Tensor

import attention_ops
from attention_ops import masks

ALL = {**cases.KINDS, **cases.SQUARE_KINDS}
PAIRS = list(itertools.combinations(ALL, 2))
SQUARE = cases.Shape(2, 2, 2, 37, 37, 4, 4)
WIDE, TALL = cases.Shape(2, 2, 2, 21, 70, 4, 4), cases.Shape(2, 2, 2, 70, 21, 4, 4)


def seen(shape: cases.Shape, mask: masks.Mask, device: str = "cpu") -> Tensor:
    """The places that the kernel sees: those with a weight. Scores are all equal, so no weight underflows."""
    query = torch.zeros(shape.batch, shape.heads, shape.queries, 1, device=device)
    key = torch.zeros(shape.batch, shape.kv_heads, shape.keys, 1, device=device)
    return attention_ops.attention_weights(query, key, mask=mask) > 0


def dense_of(shape: cases.Shape, mask: masks.Mask) -> Tensor:
    return mask.dense(shape.batch, shape.heads, shape.queries, shape.keys)


def check(shape: cases.Shape, mask: masks.Mask) -> None:
    """The kernel agrees with the predicate in the weights, and in out, lse and the gradient of value."""
    visible = dense_of(shape, mask)
    assert torch.equal(seen(shape, mask), visible)
    query = torch.zeros(shape.batch, shape.heads, shape.queries, 1)
    key = torch.zeros(shape.batch, shape.kv_heads, shape.keys, 1)
    value = torch.randn(shape.batch, shape.kv_heads, shape.keys, 3, requires_grad=True)
    out, lse = attention_ops.attention(query, key, value, mask=mask, return_lse=True)
    count = visible.sum(-1, keepdim=True).float()
    weights = visible / count.clamp(min=1)
    torch.testing.assert_close(lse, count[..., 0].log())
    torch.testing.assert_close(out, weights @ value)
    out.sum().backward()
    torch.testing.assert_close(value.grad, weights.sum(2)[..., None].expand_as(value))


@pytest.mark.every_isa
@pytest.mark.parametrize("name", ALL)
def test_every_kind(name):
    check(SQUARE, ALL[name](SQUARE))
    if name in cases.KINDS:
        check(WIDE, ALL[name](WIDE))
        check(TALL, ALL[name](TALL))


@pytest.mark.every_isa
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair(pair):
    shape = SQUARE if set(pair) & set(cases.SQUARE_KINDS) else WIDE
    a, b = (ALL[name](shape) for name in pair)
    assert torch.equal(seen(shape, a & b), dense_of(shape, a) & dense_of(shape, b))
    assert torch.equal(seen(shape, a | b), dense_of(shape, a) | dense_of(shape, b))


@pytest.mark.parametrize("seed", range(20))
def test_expressions_of_three_and_four(seed):
    torch.manual_seed(seed)
    names = [list(ALL)[n] for n in torch.randperm(len(ALL))[:4].tolist()]
    a, b, c, d = (ALL[name](SQUARE) for name in names)
    for mask in (a & b | c & d, (a | b) & (c | d), a & (b | c & d), ((a | b) & c) | d):
        assert torch.equal(seen(SQUARE, mask), dense_of(SQUARE, mask)), mask.spec


def test_precedence_of_the_text():
    spec = "sliding_window(0, 0) | causal & dilated(2)"
    assert torch.equal(seen(SQUARE, spec), dense_of(SQUARE, masks.parse(spec)))
    spec = "(sliding_window(0, 0) | causal) & dilated(2)"
    assert torch.equal(seen(SQUARE, spec), dense_of(SQUARE, masks.parse(spec)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_integers_of_any_type(dtype):
    for kind in (masks.padding, masks.prefix_lm):
        check(WIDE, kind(torch.tensor([3, 40], dtype=dtype)))
    check(SQUARE, masks.document(torch.arange(37).div(9, rounding_mode="floor").to(dtype)))


@pytest.mark.parametrize("length", [-5, 0, 21, 22, 10**12])
def test_lengths_out_of_range(length):
    check(TALL, masks.padding(torch.tensor([length, 5])))
    check(TALL, masks.padding(queries=torch.tensor([length, 5])))
    check(TALL, masks.prefix_lm(torch.tensor([length, 5])))
    check(TALL, masks.ranges(torch.full((70,), -length), torch.full((70,), length)))


@pytest.mark.parametrize("far", [10**6, 2**31 - 1, 2**31, 2**40, 2**62])
def test_far_bounds(far):
    for shape in (SQUARE, WIDE, TALL):
        check(shape, masks.sliding_window(far, far))
        check(shape, masks.sliding_window(-far, None))
        check(shape, masks.sliding_window(None, -far))
        check(shape, masks.dilated(far))


@pytest.mark.parametrize("shape", [SQUARE, WIDE, TALL], ids=str)
def test_unbounded_windows_see_all(shape):
    assert seen(shape, masks.sliding_window()).all()


@pytest.mark.parametrize("axes", list(itertools.product((1, 0), repeat=4)), ids=str)
def test_dense_broadcasts(axes):
    sizes = [n if full else 1 for n, full in zip((2, 2, 21, 70), axes, strict=True)]
    check(WIDE, masks.dense(torch.rand(sizes) < 0.5))


def test_data_may_be_strided():
    check(SQUARE, masks.document(torch.arange(74).div(9, rounding_mode="floor")[::2]))
    check(SQUARE, masks.global_tokens((torch.rand(74, 2) < 0.1).T[:, 1::2]))
    check(WIDE, masks.dense((torch.rand(2, 2, 70, 21) < 0.5).mT))
    check(WIDE, masks.dense((torch.rand(2, 2, 25, 75) < 0.5)[:, :, 2:23, 3:73]))
    check(WIDE, masks.padding(torch.tensor([3, 9, 40, 9])[::2]))
    start = torch.randint(0, 70, (21, 2)).T[:, None]
    check(WIDE, masks.ranges(start, start + 9))


BOOLEAN = {
    "dense": ((2, 1, 70, 70), masks.dense),
    "block_sparse": ((1, 2, 9, 9), lambda layout: masks.block_sparse(layout, 8)),
    "global_tokens": ((2, 70), masks.global_tokens),
}


def check_bytes(name: str, device: str = "cpu") -> None:
    """Booleans may be a view of any bytes, as those of a picture are 0 and 255."""
    shape, make = BOOLEAN[name]
    data = torch.tensor([0, 1, 2, 128, 254, 255], dtype=torch.uint8)[torch.randint(0, 6, shape)]
    places = cases.Shape(2, 2, 2, 70, 70, 4, 4)
    given = seen(places, make(data.to(device).view(torch.bool)), device)
    assert torch.equal(given.cpu(), dense_of(places, make(data != 0)))


@pytest.mark.every_isa
@pytest.mark.parametrize("name", BOOLEAN)
def test_any_byte_but_zero_is_true(name):
    check_bytes(name)


def visible_tiles(visible: Tensor, rows: int, columns: int) -> int:
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % columns, 0, -visible.shape[-2] % rows))
    return int(padded.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).any(5).any(3).sum())


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [600, 500])  # tiles are asked eight together, the last may be a part
@pytest.mark.parametrize("name", [*ALL, *cases.BOTH])
def test_only_visible_tiles_are_visited(name, length, dtype):
    """Forward: as many tiles as hold a visible element. Backward: no more than that for each of its passes."""
    shape = cases.Shape(2, 2, 2, length, length, 4, 4)
    query = torch.randn(2, 2, length, 4, dtype=dtype, requires_grad=True)
    mask = cases.MASKS[name](shape)
    rows, columns = torch.ops.attention_ops._tile_shape(query.element_size())
    tiles = visible_tiles(dense_of(shape, mask), rows, columns)
    torch.ops.attention_ops._visited_tiles()
    out = attention_ops.attention(query, query, query, mask=mask)
    assert torch.ops.attention_ops._visited_tiles() == tiles
    out.sum().backward()
    assert torch.ops.attention_ops._visited_tiles() <= 2 * tiles


def test_a_window_costs_its_width():
    visited = []
    for length in (1024, 2048):
        query = torch.randn(1, 1, length, 4)
        torch.ops.attention_ops._visited_tiles()
        attention_ops.attention(query, query, query, mask=masks.sliding_window(10, 0))
        visited.append(torch.ops.attention_ops._visited_tiles())
    assert 0 < visited[1] <= 2.1 * visited[0]


def test_blocked_is_the_other_convention():
    blocked = torch.ones(4, 4, dtype=torch.bool).triu(1)
    value = torch.eye(4)[None, None]
    query = torch.randn(1, 1, 4, 4)
    out = attention_ops.attention(query, query, value, mask=masks.blocked(blocked))
    assert torch.equal(out, attention_ops.attention(query, query, value, mask="causal"))
    assert torch.equal(out[0, 0, 0], torch.eye(4)[0])


def test_padding_on_the_left():
    """Both ways that the README gives; rotary positions need no more than the mask."""
    lengths, length = torch.tensor([9, 6]), 9
    query, key, value = torch.randn(3, 2, 2, length, 8).unbind(0)
    options = {"rope": attention_ops.rotary.Rope()}
    real = torch.arange(length) >= length - lengths[:, None]
    alone = [x[1:, :, -6:] for x in (query, key, value)]
    wanted = attention_ops.attention(*alone, mask=masks.causal(), **options)
    for mask in (masks.document(real.long()), masks.dense(real[:, None, None])):
        out = attention_ops.attention(query, key, value, mask=mask & masks.causal(), **options)
        torch.testing.assert_close(out[1:, :, -6:], wanted)


def test_text_and_data():
    lengths, ids = torch.tensor([3]), torch.zeros(5, dtype=torch.int64)
    a, b, c = masks.padding(lengths), masks.document(ids), masks.causal()
    assert (a & b & c).spec == "padding & document & causal"
    assert ((a | b) & c).spec == "(padding | document) & causal"
    assert (c & (a | b)).spec == "causal & (padding | document)"
    assert (a | b & c).spec == "padding | document & causal"
    assert (a & b).data == (lengths, ids)
    assert (b | a).data == (ids, lengths)


def test_a_mask_is_a_value():
    mask = masks.causal()
    with pytest.raises(AttributeError):
        mask.spec = "other"
    assert repr(mask) == "Mask('causal', 0 tensors)"
    with pytest.raises(TypeError):
        _ = mask & "causal"


def test_masks_have_no_truth_value():
    """`a and b` would be b alone."""
    with pytest.raises(TypeError, match=r"Mask: expected & or \| to combine masks .*, got and, or, not or if"):
        _ = masks.causal() and masks.dilated(2)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", [*ALL, "expression"])
def test_masks_can_be_copied_and_pickled(name, copied):
    """The copy has tensors of its own, which its rule reads too."""
    causal, window, *others = (make(SQUARE) for make in ALL.values())
    mask = causal & window | others[-1] if name == "expression" else ALL[name](SQUARE)
    visible = dense_of(SQUARE, mask)
    other = copied(mask)
    assert other.spec == mask.spec
    assert torch.equal(dense_of(SQUARE, other), visible)
    assert torch.equal(seen(SQUARE, other), visible)
    for x in other.data:
        x.zero_()
    assert torch.equal(dense_of(SQUARE, mask), visible)
    assert torch.equal(dense_of(SQUARE, other), seen(SQUARE, other))


def test_text_stands_for_its_mask():
    for mask in (masks.causal("upper_left"), masks.sliding_window(3, None) | masks.dilated(2) & masks.causal()):
        parsed = masks.parse(mask.spec)
        assert parsed.spec == mask.spec
        assert torch.equal(parsed.dense(1, 1, 9, 7), mask.dense(1, 1, 9, 7))


@pytest.mark.parametrize("window", [1, 2, 4, 10, 11])
def test_a_window_of_w_keys_has_w_keys(window):
    counts = seen(cases.Shape(1, 1, 1, 10, 10, 1, 1), masks.sliding_window(window - 1, 0)).sum(-1)[0, 0]
    assert counts.tolist() == [min(i + 1, window) for i in range(10)]


def test_the_grid_has_every_kind():
    """A kind that C++ knows and cases.py does not would be tested nowhere."""
    with pytest.raises(ValueError, match="expected mask kind") as error:
        attention_ops.attention(*torch.zeros(3, 1, 1, 2, 4), mask="no_such_kind")
    kinds = str(error.value).split("expected mask kind ")[1].split(", got")[0].split(", ")
    specs = " ".join(make(SQUARE).spec for make in ALL.values())
    missing = [kind for kind in kinds if not re.search(rf"\b{kind}\b", specs)]
    assert not missing
