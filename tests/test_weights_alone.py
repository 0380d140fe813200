"""Weights without a gradient, which the CPU computes without an lse: who goes that way, and what it promises."""

import warnings
from collections.abc import Callable

import cases
import pytest
import torch
from compare import OUTPUT, assert_close
from torch import Tensor
from torch.autograd import forward_ad

import attention_ops
from attention_ops import attention_weights, masks, reference

OPS = torch.ops.attention_ops
QUERY, KEY = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8)


def uses_lse(call: Callable[[], object]) -> bool:
    """Whether a forward is among what a call computes."""
    with warnings.catch_warnings(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        warnings.simplefilter("ignore")
        call()
    names = {event.name for event in profile.events()}
    assert "attention_ops::_attention_weights" in names
    return "attention_ops::_attention_forward" in names


def with_tangent() -> Tensor:
    with forward_ad.dual_level():
        return attention_weights(forward_ad.make_dual(QUERY, QUERY), KEY)


def without_grad(*args: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return attention_weights(*args, **options)


def wanting(**inputs: Tensor) -> Callable[[], Tensor]:
    """A call where one input has a gradient."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    return lambda: attention_weights(**{"query": QUERY, "key": KEY, **inputs})


ALONE = {
    "plain": lambda: attention_weights(QUERY, KEY),
    "no_grad": lambda: without_grad(QUERY.clone().requires_grad_(), KEY),
    "inference": lambda: torch.inference_mode()(attention_weights)(QUERY, KEY, average=True),
    "rows": lambda: attention_weights(QUERY, KEY, rows=torch.tensor([2]), heads=torch.tensor([1, 3])),
    "mask": lambda: attention_weights(QUERY, KEY, mask=masks.padding(torch.tensor([3, 5]))),
    "distances": lambda: attention_weights(QUERY, KEY, distance_bias=torch.randn(19), rows=torch.tensor([2, 1])),
}
WITH_LSE = {
    "query": wanting(query=QUERY.clone()),
    "key": wanting(key=KEY.clone()),
    "bias": wanting(bias=torch.randn(9, 11)),
    "distance_bias": wanting(distance_bias=torch.randn(19)),
    "relative_key": wanting(relative_key=torch.randn(19, 8)),
    "sinks": wanting(sinks=torch.randn(4)),
    "tangent": with_tangent,
    "jvp": lambda: torch.func.jvp(lambda q: attention_weights(q, KEY), (QUERY,), (QUERY,)),
    "grad": lambda: torch.func.grad(lambda q: attention_weights(q, KEY).square().sum())(QUERY),
    "vmap": lambda: torch.vmap(lambda q: attention_weights(q, KEY))(QUERY[None]),
    "vmap_rows": lambda: torch.vmap(lambda r: attention_weights(QUERY, KEY, rows=r))(torch.tensor([[1], [2]])),
    "vmap_mask": lambda: torch.vmap(lambda x: attention_weights(QUERY, KEY, mask=x))(torch.rand(3, 9, 11) < 0.5),
    "compile": lambda: torch.compile(without_grad, backend="aot_eager", fullgraph=True)(QUERY, KEY),
}


@pytest.mark.parametrize("name", ALONE)
def test_without_a_derivative_there_is_no_lse(name):
    assert not uses_lse(ALONE[name])


@pytest.mark.parametrize("name", WITH_LSE)
def test_derivatives_and_transforms_have_an_lse(name):
    assert uses_lse(WITH_LSE[name])


@pytest.mark.parametrize("average", [False, True])
def test_each_score_is_computed_once(average):
    """Of the chosen rows and heads alone."""
    query = torch.randn(1, 4, 700, 8)

    def visited(**options: object) -> int:
        OPS._visited_tiles()
        attention_weights(query, query, average=average, **options)
        return OPS._visited_tiles()

    rows, _ = OPS._tile_shape(query.element_size())
    panels, tiles = -(-700 // rows), -(-700 // 64)
    assert visited() == 4 * panels * tiles
    assert 4 * panels * tiles / 2 < visited(mask="causal") < 4 * panels * tiles * 0.6
    assert visited(rows=torch.tensor([699, 3]), heads=torch.tensor([2])) == tiles
    assert visited(rows=torch.tensor([70]), mask="causal") == 4 * 2


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "window", "dense", "document", "nothing"])
def test_a_row_is_the_same_in_any_company(mask, dtype):
    """Its bits, among all rows and heads and among some."""
    shape = cases.Shape(2, 4, 2, 150, 150, 20, 1)
    inputs = cases.make(cases.Case(shape, mask=mask, bias="bias_inf", sinks=True, dtype=dtype))
    tensors = {name: x.detach() for name, x in inputs.tensors.items() if name != "value"}
    rows, heads = torch.tensor([149, 0, 77, 78, 3, 149, 64, 63]), torch.tensor([2, 0])
    whole = attention_weights(**tensors, **inputs.options)
    some = attention_weights(**tensors, **inputs.options, rows=rows, heads=heads)
    assert torch.equal(some, whole[:, heads][:, :, rows])
    means = attention_weights(**tensors, **inputs.options, average=True)
    assert torch.equal(
        attention_weights(**tensors, **inputs.options, average=True, rows=rows),
        means[:, rows],
    )


def test_few_rows_have_the_bits_of_all():
    query, key = torch.randn(2, 1, 8, 200, 128, dtype=torch.bfloat16).unbind(0)
    whole = attention_weights(query, key)
    for rows in ([77], [0, 1, 2], [5, 199, 63, 64, 8]):
        assert torch.equal(attention_weights(query, key, rows=torch.tensor(rows)), whole[:, :, rows])


@pytest.mark.parametrize("lengths", [(1, 1000), (65, 129), (200, 63)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3])
def test_scores_of_any_size(size, dtype, lengths):
    """Nothing is lost with a rounded lse."""
    query, key = (torch.randn(1, 2, n, 33).to(dtype) for n in lengths)
    query = (size * query.float()).to(dtype)
    options = {"mask": "causal", "sinks": size * torch.randn(2)}
    exact = reference.attention_weights(
        query.double(), key.double(), mask="causal", sinks=options["sinks"].double(), scale=0.2
    )
    plain = reference.attention_weights(query, key, **options, scale=0.2)
    assert_close(attention_weights(query, key, **options, scale=0.2), plain, exact, OUTPUT)


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("place", ["query", "key"])
def test_nan_reaches_exactly_the_rows_that_see_it(place, wants):
    tensors = {"query": torch.randn(1, 1, 100, 8), "key": torch.randn(1, 1, 100, 8)}

    def weights() -> Tensor:
        given = {name: x.clone().requires_grad_(wants) for name, x in tensors.items()}
        return attention_weights(**given, mask="causal").detach()[0, 0]

    clean = weights()
    tensors[place][0, 0, 40] = torch.nan
    touched = torch.arange(100) >= 40 if place == "key" else torch.arange(100) == 40
    visible = torch.ones(100, 100).tril().bool()
    assert torch.equal(weights().isnan(), visible & touched[:, None])
    assert (weights()[~visible] == 0).all()
    assert torch.equal(weights()[~touched], clean[~touched])


@pytest.mark.parametrize("wants", [False, True])
def test_a_mean_over_no_heads_is_nan(wants):
    query, key = torch.randn(1, 2, 5, 8, requires_grad=wants), torch.randn(1, 2, 6, 8)
    none = torch.tensor([], dtype=torch.int64)
    assert attention_weights(query, key, heads=none, average=True, mask="causal").isnan().all()


@pytest.mark.parametrize("sink", [torch.nan, torch.inf, -torch.inf])
def test_sinks_that_are_no_number(sink):
    sinks = torch.tensor([0.0, sink])
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    weights = attention_weights(query, key, sinks=sinks)
    torch.testing.assert_close(
        weights, attention_weights(query.clone().requires_grad_(), key, sinks=sinks).detach(), equal_nan=True
    )


def test_a_derivative_without_lse_is_refused():
    query = QUERY.clone().requires_grad_()
    args = (KEY, KEY[..., :0], None, None, None, [], "", 0.3, 0.0, 0.0, None, None, None, None, 9, False)
    assert torch.equal(OPS._attention_weights(QUERY, *args), attention_weights(QUERY, KEY, scale=0.3))
    with pytest.raises(NotImplementedError, match=r"_attention_weights: expected .* with lse None, without gradients"):
        OPS._attention_weights(query, *args)
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="with lse None"):
        OPS._attention_weights(QUERY, *args[:4], sinks, *args[5:])


@pytest.mark.parametrize("average", [False, True])
def test_opcheck_without_lse(average):
    query, key, sinks = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(4)
    args = (query, key, key[..., :0], torch.randn(1, 4, 5, 7), None, sinks, [], "causal", 0.3, 1.5, 0.0, None)
    torch.library.opcheck(OPS._attention_weights.default, (*args, None, None, None, 5, average))
    rows = torch.tensor([4, 0, 1, 2, 3])
    torch.library.opcheck(OPS._attention_weights.default, (*args, None, None, rows, 5, average))


def test_autocast_casts_without_lse():
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention_weights(QUERY, KEY)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, attention_ops.attention_weights(QUERY.bfloat16(), KEY.bfloat16()))
