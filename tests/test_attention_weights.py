"""attention_weights and attention_summaries: values and gradients against the formula in float64."""

import itertools
from collections.abc import Callable

import cases
import pytest
import torch
from compare import GRADIENT, OUTPUT, assert_close, assert_exact
from torch import Tensor

import attention_ops
from attention_ops import masks, reference

NAMES = ("column_sum", "entropy", "maximum")
NO_DROPOUT = [case for case in cases.CASES if not case.dropout_p]


def values(function: Callable, inputs: cases.Inputs, **more: object) -> tuple[Tensor, ...]:
    """The results of one call."""
    tensors = {name: t for name, t in inputs.tensors.items() if name not in cases.OF_VALUES}
    results = function(**tensors, **inputs.options, **more)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def run(function: Callable, inputs: cases.Inputs, grads: list[Tensor], **more: object) -> tuple[tuple, tuple]:
    """The results of one call, and the gradients of its inputs."""
    tensors = {name: t for name, t in inputs.tensors.items() if name not in cases.OF_VALUES}
    results = values(function, inputs, **more)
    grads = [grad.to(result).reshape(result.shape) for grad, result in zip(grads, results, strict=True)]
    found = torch.autograd.grad(results, list(tensors.values()), grads, allow_unused=True)
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(tensors.values(), found, strict=True)]
    return tuple(r.detach().cpu() for r in results), tuple(zip(tensors, (g.cpu() for g in found), strict=True))


def check(
    case: cases.Case, ours: Callable, formula: Callable, grads: list[Tensor], types: tuple, device="cpu", **more
) -> None:
    inputs = cases.make(case)
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in more.items()}
    results, found = run(ours, inputs.on(device), grads, **there)
    with torch.no_grad():  # where weights are normalised on the way
        alone = values(ours, inputs.on(device), **there)
    exact, exact_grads = run(formula, inputs.to(torch.float64), grads, **more)
    plain, plain_grads = run(formula, inputs.to(case.dtype), grads, **more)
    of_lse = 16  # rows, as lse is rounded at its size; weights without gradients have none
    for name, dtype, result, one, *two in zip(NAMES, types, results, alone, plain, exact, strict=False):
        assert result.dtype == one.dtype == dtype
        assert_close(result, *two, OUTPUT, name, rows=of_lse)
        assert_close(one.cpu(), *two, OUTPUT, f"{name} without gradients", rows=of_lse if len(types) > 1 else 1)
    for (name, ours_g), (_, plain_g), (_, exact_g) in zip(found, plain_grads, exact_grads, strict=True):
        assert ours_g.dtype == inputs.tensors[name].dtype
        # Of each result the difference of two larger parts, through w and through lse, which was rounded at its size.
        rows = cases.rows_summed(case, name, ours_g) * 36 * len(results)
        assert_close(ours_g, plain_g, exact_g, GRADIENT, name, rows)


def check_weights(case: cases.Case, device: str = "cpu") -> None:
    shape = case.shape
    grads = [torch.randn(shape.batch, shape.heads, shape.queries, shape.keys)]
    check(case, attention_ops.attention_weights, reference.attention_weights, grads, (case.dtype,), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", NO_DROPOUT[::2], ids=str)
def test_weights(case):
    check_weights(case)


def selections(case: cases.Case) -> list[dict]:
    """Some heads or all, some rows or all, each head or their mean."""
    heads = torch.randint(0, case.shape.heads, (3,))
    rows = torch.randint(0, case.shape.queries, (5,))
    names = ("average", "heads", "rows")
    chosen = itertools.product((False, True), (None, heads), (None, rows))
    return [dict(zip(names, values, strict=True)) for values in chosen]


def check_selection(case: cases.Case, selection: dict, device: str = "cpu") -> None:
    shape = case.shape
    chosen = (selection["heads"], shape.heads), (selection["rows"], shape.queries)
    counts = [n if index is None else len(index) for index, n in chosen]
    grads = [torch.randn(shape.batch, *counts[1 if selection["average"] else 0 :], shape.keys)]
    ours, formula = attention_ops.attention_weights, reference.attention_weights
    check(case, ours, formula, grads, (case.dtype,), device, **selection)


@pytest.mark.parametrize("case", NO_DROPOUT[1::2], ids=str)
def test_weights_of_some_heads_and_rows(case):
    for selection in selections(case):
        check_selection(case, selection)


def no_ties(case: cases.Case) -> bool:
    """Whether the largest weight of a row is at one clear place, so that rounding cannot move its gradient."""
    return case.scale != 0 and case.dtype in (torch.float32, torch.float64) and case.strides != "expanded"


WITHOUT_TIES = [case for case in NO_DROPOUT if no_ties(case)]


def check_summaries(case: cases.Case, device: str = "cpu") -> None:
    shape, dtype = case.shape, case.dtype
    sizes = (shape.keys, shape.queries, shape.queries)
    grads = [torch.randn(shape.batch, shape.heads, n) for n in sizes]
    check(case, attention_ops.attention_summaries, reference.attention_summaries, grads, (dtype,) * 3, device)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", WITHOUT_TIES, ids=str)
def test_summaries(case):
    check_summaries(case)


def check_half_summaries(mask: str, dtype: torch.dtype, device: str = "cpu") -> None:
    inputs = cases.make(cases.Case(cases.Shape(2, 4, 2, 33, 40, 16, 1), mask=mask, dtype=dtype))
    there = inputs.on(device)
    tensors = {name: there.tensors[name] for name in ("query", "key")}
    ours = attention_ops.attention_summaries(**tensors, **there.options)
    given = {name: inputs.tensors[name] for name in tensors}
    exact = reference.attention_summaries(**{n: t.double() for n, t in given.items()}, **inputs.options)
    plain = reference.attention_summaries(**{n: t.float() for n, t in given.items()}, **inputs.options)
    for name, *three in zip(NAMES, (x.cpu() for x in ours), plain, exact, strict=True):
        assert three[0].dtype == torch.float32
        assert_close(*three, OUTPUT, name)
    sum(result.sum() for result in ours).backward()
    assert tensors["query"].grad.dtype == dtype
    assert tensors["query"].grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding"])
def test_summaries_of_half_types(mask, dtype):
    check_half_summaries(mask, dtype)


def test_maximum_takes_the_first_of_equal_places():
    query, key = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 3, 2, dtype=torch.float64)
    bias = torch.zeros(1, 1, 1, 3, dtype=torch.float64, requires_grad=True)
    maximum = attention_ops.attention_summaries(query, key, bias=bias).maximum
    maximum.sum().backward()
    assert_exact(bias.grad, torch.tensor([[[[2.0, -1.0, -1.0]]]], dtype=torch.float64) / 9)


def test_weights_are_the_attention_of_the_identity():
    """The weights equal what attention does to one-hot values, so the two operators share one meaning."""
    query, key = torch.randn(2, 4, 20, 8, dtype=torch.float64), torch.randn(2, 2, 30, 8, dtype=torch.float64)
    options = {"mask": masks.causal(), "sinks": torch.randn(4, dtype=torch.float64), "softcap": 2.0}
    identity = torch.eye(30, dtype=torch.float64).expand(2, 2, 30, 30)
    weights = attention_ops.attention_weights(query, key, **options)
    assert_exact(weights, attention_ops.attention(query, key, identity, **options))


@pytest.mark.parametrize("names", [s for n in range(1, 5) for s in itertools.combinations(range(4), n)], ids=str)
def test_gradcheck_of_every_subset(names):
    sizes = ((2, 2, 3, 3), (2, 1, 4, 3), (1, 2, 3, 4), (2,))
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=n in names) for n, size in enumerate(sizes)]
    options = {"mask": "causal", "softcap": 1.5}

    def weights(query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return attention_ops.attention_weights(query, key, bias=bias, sinks=sinks, **options)

    def summaries(query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor) -> tuple:
        return tuple(attention_ops.attention_summaries(query, key, bias=bias, sinks=sinks, **options))

    assert torch.autograd.gradcheck(weights, tensors)
    assert torch.autograd.gradcheck(summaries, tensors)


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape):
    case = cases.Case(shape, mask="causal", sinks=True)
    check_weights(case)
    check_summaries(case)


def test_empty_selection():
    query = torch.randn(2, 2, 5, 4)
    none = torch.zeros(0, dtype=torch.int64)
    assert attention_ops.attention_weights(query, query, heads=none).shape == (2, 0, 5, 5)
    assert attention_ops.attention_weights(query, query, rows=none).shape == (2, 2, 0, 5)


@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 3)], ids=str)
def test_leading_dimensions(leading):
    query, key = torch.randn(*leading, 4, 5, dtype=torch.float64), torch.randn(*leading, 6, 5, dtype=torch.float64)
    flat = [t.reshape(-1, 1, *t.shape[-2:]) for t in (query, key)]
    weights = attention_ops.attention_weights(query, key, mask="causal")
    assert_exact(weights, reference.attention_weights(*flat, mask="causal").reshape(*leading, 4, 6))
    summaries = attention_ops.attention_summaries(query, key, mask="causal")
    for ours, exact in zip(summaries, reference.attention_summaries(*flat, mask="causal"), strict=True):
        assert_exact(ours, exact.reshape(*leading, -1))


def test_weights_are_contiguous_in_the_type_of_query():
    query = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16).transpose(2, 3).contiguous().transpose(2, 3)
    weights = attention_ops.attention_weights(query, query)
    assert weights.dtype == torch.bfloat16
    assert weights.is_contiguous()
