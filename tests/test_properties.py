"""Properties of random calls: shapes, strides, masks and options that nobody thought of."""

import cases
import hypothesis.strategies as st
import pytest
import torch
from compare import GRADIENT, OUTPUT, assert_close
from hypothesis import given

import attention_ops
from attention_ops import masks, reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
lengths = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129]))
widths = st.one_of(st.integers(0, 20), st.sampled_from([32, 40, 64, 65]))


@st.composite
def shapes(draw) -> cases.Shape:
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries = draw(lengths)
    keys = queries if draw(st.booleans()) else draw(lengths)
    return cases.Shape(draw(st.integers(0, 2)), kv_heads * group, kv_heads, queries, keys, draw(widths), draw(widths))


@st.composite
def random_cases(draw) -> cases.Case:
    shape = draw(shapes())
    return cases.Case(
        shape=shape,
        mask=draw(st.sampled_from([m for m in cases.MASKS if shape.square or m not in cases.SQUARE_KINDS])),
        bias=draw(st.sampled_from(list(cases.BIASES))),
        distance=draw(st.sampled_from(list(cases.DISTANCES))),
        sinks=draw(st.booleans()),
        softcap=draw(st.one_of(st.none(), st.floats(0.5, 50))),
        scale=draw(st.one_of(st.none(), st.floats(-1, 1))),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.2, 0.9])),
        dtype=draw(st.sampled_from(DTYPES)),
        strides=draw(st.sampled_from(cases.AXES["strides"])),
    )


@st.composite
def random_masks(draw, depth: int = 3) -> masks.Mask:
    if depth and draw(st.booleans()):
        a, b = draw(random_masks(depth - 1)), draw(random_masks(depth - 1))
        return a & b if draw(st.booleans()) else a | b
    bound = st.one_of(st.none(), st.integers(-30, 30))
    return draw(
        st.one_of(
            st.builds(masks.causal, st.sampled_from(["lower_right", "upper_left"])),
            st.builds(masks.sliding_window, bound, bound),
            st.builds(masks.dilated, st.integers(1, 9)),
            st.builds(lambda n: masks.padding(torch.tensor([n])), st.integers(0, 80)),
            st.builds(lambda n: masks.padding(queries=torch.tensor([n])), st.integers(0, 80)),
            st.builds(lambda n: masks.prefix_lm(torch.tensor([n])), st.integers(0, 80)),
        )
    )


@given(case=random_cases(), seed=st.integers(0, 2**32 - 1))
def test_values_and_gradients(case, seed):
    torch.manual_seed(seed)
    inputs = cases.make(case)
    results = []
    for function, dtype in (
        (attention_ops.attention, None),
        (reference.attention, case.dtype),
        (reference.attention, torch.float64),
    ):
        given_inputs = inputs if dtype is None else inputs.to(dtype)
        out = function(**given_inputs.tensors, **given_inputs.options)
        torch.manual_seed(seed)
        grad = torch.randn(out.shape).to(out.dtype)
        leaves = list(given_inputs.tensors.values())
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad, materialize_grads=True)])
    for name, *three in zip(("out", *inputs.tensors), *results, strict=True):
        factor = OUTPUT if name == "out" else GRADIENT
        assert_close(*three, factor, name, cases.rows_summed(case, name, three[0]))


@given(mask=random_masks(), queries=lengths, keys=lengths)
def test_masks(mask, queries, keys):
    query, key = torch.zeros(1, 1, queries, 1), torch.zeros(1, 1, keys, 1)
    seen = attention_ops.attention_weights(query, key, mask=mask) > 0
    assert torch.equal(seen, mask.dense(1, 1, queries, keys))


@given(case=random_cases(), seed=st.integers(0, 2**32 - 1))
def test_weights_sum_to_one_or_zero(case, seed):
    torch.manual_seed(seed)
    inputs = cases.make(case)
    tensors = {name: inputs.tensors[name] for name in inputs.tensors if name not in (*cases.OF_VALUES, "sinks")}
    options = {name: o for name, o in inputs.options.items() if name not in ("dropout_p", "seed")}
    sums = attention_ops.attention_weights(**tensors, **options).double().sum(-1)
    visible = reference.attention_weights(**tensors, **options).double().sum(-1) > 0.5
    lse = attention_ops.attention(**tensors, value=tensors["key"], **options, return_lse=True)[1].double()
    tolerance = torch.finfo(case.dtype).eps * (4 + lse.where(visible, 0).abs())  # lse is rounded, and p = exp(s - lse)
    assert ((sums - visible.double()).abs() <= tolerance).all()


@given(case=random_cases(), seed=st.integers(0, 2**32 - 1))
def test_batches_and_heads_are_independent(case, seed):
    """A batch computed at once equals its samples computed alone, bit for bit."""
    torch.manual_seed(seed)
    inputs = cases.make(
        cases.Case(case.shape, bias=case.bias, distance=case.distance, dtype=case.dtype, strides=case.strides)
    )
    tensors = {name: t.detach() for name, t in inputs.tensors.items()}
    out = attention_ops.attention(**tensors)
    for batch in range(case.shape.batch):
        one = {name: t[batch : batch + 1] if t.shape[0] > 1 else t for name, t in tensors.items()}
        assert torch.equal(out[batch : batch + 1], attention_ops.attention(**one))


@pytest.mark.parametrize("shift", [100.0, -100.0])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_constant_added_to_all_scores_changes_lse_alone(shift, seed):
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64).unbind(0)
    out, lse = attention_ops.attention(query, key, value, mask="causal", return_lse=True)
    bias = torch.full((1, 1, 1, 1), shift, dtype=torch.float64)
    shifted, shifted_lse = attention_ops.attention(query, key, value, bias=bias, mask="causal", return_lse=True)
    torch.testing.assert_close(shifted, out)
    torch.testing.assert_close(shifted_lse, lse + shift)


@pytest.mark.every_isa
@pytest.mark.parametrize("width", [32, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_what_their_neighbours_hold(dtype, width):
    """Not by a bit: neither on a row that outgrows its first maximum, nor on what another row sees before it does."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 448, width).to(dtype).unbind(0)
    key[:, :, 250] *= 2  # where the row's maximum moves
    bias = torch.zeros(1, 1, 448, 448)
    bias[..., :15, :64] = -torch.inf
    results = []
    for change in (False, True):
        if change:
            query[:, :, 40] *= 50
            bias[..., 14, :64] = 0
        results.append(
            attention_ops.attention(query, key, value, bias=bias, sinks=torch.full((2,), 1.3), return_lse=True)
        )
        results[-1] += attention_ops.attention(query, key, value, return_lse=True)
    others = [i for i in range(448) if i not in (14, 40)]
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:, :, others], after[:, :, others])


def test_values_of_almost_any_size_are_averaged():
    query, key = torch.ones(1, 1, 20, 1), torch.zeros(1, 1, 128, 1)
    key[:, :, 64:] = 9.5
    out = attention_ops.attention(query, key, torch.full((1, 1, 128, 4), 1e33), scale=1.0)
    torch.testing.assert_close(out, torch.full_like(out, 1e33))
