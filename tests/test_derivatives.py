"""Forward mode and second derivatives of every operator, against the formula in float64."""

import functools
import itertools
from collections.abc import Callable

import cases
import pytest
import torch
from compare import OUTPUT, SECOND, assert_close
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import attention_ops
from attention_ops import masks, reference

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(DIFFERENTIABLE, n)]
NO_DROPOUT = [case for case in cases.CASES if not case.dropout_p]
CHECK_ALL = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
CHECK_ALL_TWICE = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "check_batched_grad": True}


def results_of(function: Callable, inputs: cases.Inputs, **more: object) -> Callable[..., tuple[Tensor, ...]]:
    """A function of the tensors alone, whose results are a tuple."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = function(**dict(zip(inputs.tensors, tensors, strict=True)), **inputs.options, **more)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    return call


def like(tensors: list[Tensor]) -> list[Tensor]:
    """Numbers that every type holds exactly."""
    return [torch.randint(-64, 65, t.shape) / 32 for t in tensors]


def typed(given: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(g.to(t) for g, t in zip(given, tensors, strict=True))


def first_and_second(function: Callable, inputs: cases.Inputs, draw: dict, **more) -> dict[str, Tensor]:
    """The results' tangents along a direction, and the gradient of the gradients' sum along another."""
    call = results_of(function, inputs, **more)
    # A dual number's tangent is laid out as its primal, which for an expanded one torch refuses.
    tensors = [t.detach().contiguous() if 0 in t.stride() else t.detach() for t in inputs.tensors.values()]
    if "along" not in draw:
        draw["along"], draw["second"] = like(tensors), like(tensors)
        draw["grads"] = like(list(call(*tensors)))
    _, tangents = jvp(call, tuple(tensors), typed(draw["along"], tensors))
    found = {f"tangent {n}": t for n, t in enumerate(tangents)}
    leaves = [t.clone().requires_grad_() for t in tensors]
    results = call(*leaves)
    grads = [g.to(r).requires_grad_() for g, r in zip(draw["grads"], results, strict=True)]
    first = torch.autograd.grad(results, leaves, grads, create_graph=True, materialize_grads=True)
    terms = [(g * d.to(g)).double().sum() for g, d in zip(first, draw["second"], strict=True)]
    names = [*inputs.tensors, *(f"gradient {n}" for n in range(len(grads)))]
    second = torch.autograd.grad(sum(terms), [*leaves, *grads], materialize_grads=True)
    return found | dict(zip(names, second, strict=True))


def check(
    case: cases.Case, ours: Callable, formula: Callable, without: tuple[str, ...] = (), device: str = "cpu", **more
) -> None:
    made, draw = cases.make(case), {}
    inputs = cases.Inputs({n: t for n, t in made.tensors.items() if n not in without}, made.options)
    found = {name: x.cpu() for name, x in first_and_second(ours, inputs.on(device), draw, **more).items()}
    plain = first_and_second(formula, inputs.to(case.dtype), draw, **more)
    exact = first_and_second(formula, inputs.to(torch.float64), draw, **more)
    for name, x in found.items():
        factor = OUTPUT if name.startswith("tangent") else SECOND
        # A tangent is the difference of two sums, of weights from a rounded lse. A second derivative has four of them
        # where a first has two, each through the weights and through lse.
        terms = 9 if name.startswith("tangent") else 16
        assert_close(x, plain[name], exact[name], factor, name, cases.rows_summed(case, name, x) * terms)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_attention(case):
    check(case, attention_ops.attention, reference.attention, return_lse=True)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", cases.COMPACT, ids=str)
def test_compact(case):
    check(case, attention_ops.attention, reference.attention, return_lse=True)


@pytest.mark.parametrize("case", NO_DROPOUT[::2], ids=str)
def test_weights(case):
    check(case, attention_ops.attention_weights, reference.attention_weights, without=cases.OF_VALUES)


@pytest.mark.parametrize("case", NO_DROPOUT[1::4], ids=str)
def test_weights_of_some_heads_and_rows(case):
    shape = case.shape
    more = {"heads": torch.randint(0, shape.heads, (3,)), "rows": torch.randint(0, shape.queries, (5,))}
    for average in (False, True):
        check(
            case, attention_ops.attention_weights, reference.attention_weights, cases.OF_VALUES, average=average, **more
        )


def no_ties(case: cases.Case) -> bool:
    """Whether the largest weight of a row is at one clear place, so that rounding cannot move its derivatives."""
    return case.scale != 0 and case.dtype in (torch.float32, torch.float64) and case.strides != "expanded"


@pytest.mark.parametrize("case", [c for c in NO_DROPOUT if no_ties(c)], ids=str)
def test_summaries(case):
    check(case, attention_ops.attention_summaries, reference.attention_summaries, without=cases.OF_VALUES)


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape):
    case = cases.Case(shape, mask="causal", bias="bias", sinks=True)
    check(case, attention_ops.attention, reference.attention, return_lse=True)
    check(case, attention_ops.attention_weights, reference.attention_weights, without=cases.OF_VALUES)
    check(case, attention_ops.attention_summaries, reference.attention_summaries, without=cases.OF_VALUES)


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_gradgradcheck_of_every_subset(subset):
    tensors = cases.small_inputs()
    for name in subset:
        tensors[name].requires_grad_()
    options = {"mask": "causal", "softcap": 1.5, "dropout_p": 0.25, "seed": torch.tensor([3]), "return_lse": True}

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return attention_ops.attention(**{**tensors, **dict(zip(subset, args, strict=True))}, **options)

    leaves = [tensors[name] for name in subset]
    assert torch.autograd.gradcheck(function, leaves, **CHECK_ALL)
    assert torch.autograd.gradgradcheck(function, leaves, **CHECK_ALL_TWICE)


@pytest.mark.parametrize("name", ["attention_weights", "attention_summaries"])
@pytest.mark.parametrize("subset", [s for s in SUBSETS if "value" not in s], ids="-".join)
def test_gradgradcheck_of_weights(subset, name):
    tensors = {n: t for n, t in cases.small_inputs().items() if n != "value"}
    for n in subset:
        tensors[n].requires_grad_()

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        results = getattr(attention_ops, name)(
            **{**tensors, **dict(zip(subset, args, strict=True))}, mask="causal", softcap=1.5
        )
        return (results,) if isinstance(results, Tensor) else tuple(results)

    leaves = [tensors[n] for n in subset]
    assert torch.autograd.gradcheck(function, leaves, **CHECK_ALL)
    assert torch.autograd.gradgradcheck(function, leaves, **CHECK_ALL_TWICE)


@pytest.mark.parametrize("mask", [name for name in cases.MASKS if name != "no_mask"])
def test_gradgradcheck_with_every_mask(mask):
    case = cases.Case(cases.Shape(2, 2, 1, 5, 5, 3, 2), mask=mask, dtype=torch.float64)
    inputs = cases.make(case)
    function = results_of(attention_ops.attention, inputs, return_lse=True)
    leaves = list(inputs.tensors.values())
    empty = attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True)[1].isinf()

    def finite(*tensors: Tensor) -> tuple[Tensor, Tensor]:  # lse is -inf where nothing is visible
        out, lse = function(*tensors)
        return out, torch.where(empty, 0, lse)

    assert torch.autograd.gradcheck(finite, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(finite, leaves, check_fwd_over_rev=True)


def loss_of(function: Callable) -> Callable[..., Tensor]:
    """A number that depends on out and on lse in a way that is not linear."""

    def loss(*tensors: Tensor) -> Tensor:
        out, lse = function(*tensors, mask="causal", softcap=2.0, return_lse=True)
        return out.square().sum() + (out.sum(-1) * lse.sin()).sum()

    return loss


TRANSFORMS = {
    "grad": lambda f: grad(f, (0, 1, 2)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, (0, 2)), (0, 1)),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f, (0, 2)), (0, 1)),
    "hessian": lambda f: hessian(f, (0, 1, 2)),
    "grad of grad": lambda f: grad(lambda q, k, v: sum(g.square().sum() for g in grad(f, (0, 1))(q, k, v)), (0, 1, 2)),
    "jvp of grad": lambda f: lambda *x: jvp(grad(f, (0, 1, 2)), x, tuple(t.cos() for t in x)),
    "vjp of grad": lambda f: lambda *x: vjp(grad(f, (0, 1, 2)), *x)[1](tuple(t.cos() for t in x)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_those_of_the_formula(name):
    given = [torch.randn(size, dtype=torch.float64) for size in ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2))]
    found, wanted = (
        torch.utils._pytree.tree_leaves(TRANSFORMS[name](loss_of(f))(*given))
        for f in (attention_ops.attention, reference.attention)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_gradient_of_a_tangent():
    """Reverse over forward: the derivative of a jvp with respect to its inputs and its tangents."""
    given = [torch.randn(size, dtype=torch.float64) for size in ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2))]

    def loss(query: Tensor, key: Tensor, value: Tensor, along: Tensor) -> Tensor:
        tangent = jvp(lambda q: attention_ops.attention(q, key, value, mask="causal"), (query,), (along,))[1]
        return tangent.square().sum()

    leaves = [t.requires_grad_() for t in (*given, torch.randn(1, 2, 3, 2, dtype=torch.float64))]
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("name", ["grad", "hessian", "jvp of grad"])
def test_vmap_of_transforms_equals_a_loop(name):
    given = [torch.randn(3, *size, dtype=torch.float64) for size in ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2))]
    function = TRANSFORMS[name](loss_of(attention_ops.attention))
    found = torch.utils._pytree.tree_leaves(vmap(function)(*given))
    for n in range(3):
        for a, b in zip(found, torch.utils._pytree.tree_leaves(function(*(t[n] for t in given))), strict=True):
            torch.testing.assert_close(a[n], b)


def test_vmap_over_tangents_of_bias_and_sinks():
    tensors = cases.small_inputs()
    for name in ("bias", "sinks"):
        rest = {n: t for n, t in tensors.items() if n != name}

        def function(x: Tensor, name: str = name, rest: dict = rest) -> Tensor:
            return attention_ops.attention(**rest, **{name: x}, mask="causal")

        found, wanted = jacfwd(function)(tensors[name]), jacrev(function)(tensors[name])
        torch.testing.assert_close(found, wanted)


def test_directions_are_those_of_reverse_mode_in_a_long_problem():
    """Several panels and blocks, tasks that share keys, and no float64 formula needed: <g, J d> = <J' g, d>."""
    inputs = cases.make(cases.Case(cases.Shape(1, 4, 2, 300, 700, 32, 24), mask="causal", bias="bias_keys", sinks=True))
    function = results_of(attention_ops.attention, inputs.to(torch.float64), return_lse=True)
    leaves = [t.double() for t in inputs.tensors.values()]
    along = [torch.randn_like(t) for t in leaves]
    results, tangents = jvp(function, tuple(leaves), tuple(along))
    grads = [torch.randn_like(t) for t in results]
    back = vjp(function, *leaves)[1](tuple(grads))
    forward_side = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close(forward_side, sum((b * a).sum() for b, a in zip(back, along, strict=True)))


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_are_equal_for_any_number_of_threads(threads):
    inputs = cases.make(
        cases.Case(cases.Shape(2, 4, 2, 300, 260, 20, 33), "causal", "bias_keys", "relative", sinks=True, dropout_p=0.1)
    )
    before, draw = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        wanted = first_and_second(attention_ops.attention, inputs, draw, return_lse=True)
        torch.set_num_threads(threads)
        found = first_and_second(attention_ops.attention, inputs, draw, return_lse=True)
    finally:
        torch.set_num_threads(before)
    for name, x in found.items():
        assert torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_masked_reaches_no_derivative(value, dtype):
    check_masked(value, dtype)


def check_masked(
    value: float, dtype: torch.dtype, device: str = "cpu", heads: tuple = (4, 2), lengths: tuple = (90, 70)
) -> None:
    """NaN and infinity in masked rows of everything, and of their tangents, change no bit of any derivative."""
    length, seen = lengths[0], torch.tensor([lengths[1]], device=device)
    sizes = {"query": (1, heads[0], length, 8), "key": (1, heads[1], length, 8)}
    sizes |= {"value": sizes["key"], "bias": (1, 1, length, length), "sinks": (heads[0],)}
    tensors, along = ({n: torch.randn(s, dtype=dtype).to(device) for n, s in sizes.items()} for _ in range(2))
    tensors["bias"][..., ::7] = -torch.inf
    options = {"mask": masks.padding(seen, queries=seen), "softcap": 3.0, "dropout_p": 0.2}
    options["seed"] = torch.tensor([5], device=device)
    clean = second_along(tensors, along, options)
    for group in (tensors, along):
        for name in ("query", "key", "value", "bias"):
            group[name][..., seen.item() :, :] = value
        group["bias"][..., seen.item() :] = value
        along["bias"][..., ::7] = value
    for a, b in zip(second_along(tensors, along, options), clean, strict=True):
        assert not b.isnan().any()
        assert torch.equal(a, b)


def second_along(tensors: dict[str, Tensor], along: dict[str, Tensor], options: dict) -> list[Tensor]:
    def forward(*x: Tensor) -> Tensor:
        named = dict(zip(tensors, x, strict=True))
        out, lse = attention_ops.attention(**named, **options, return_lse=True)
        return torch.cat([out, lse[..., None]], -1)

    def first(*x: Tensor) -> tuple[Tensor, ...]:
        return grad(lambda *y: forward(*y).sin().sum(), tuple(range(len(tensors))))(*x)

    given, moves = tuple(tensors.values()), tuple(along.values())
    return [jvp(forward, given, moves)[1], *jvp(first, given, moves)[1]]


@pytest.mark.parametrize("product", ["hvp", "vhp", "jvp", "vjp"])
@pytest.mark.parametrize("operator", ["attention", "attention_weights", "attention_summaries"])
def test_products_of_the_functional_module(operator, product):
    """Its hvp and jvp differentiate a gradient by what came in for it."""
    count = 3 if operator == "attention" else 2
    given = tuple(torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(count))
    along = tuple(torch.randn_like(t) for t in given)

    def loss(module: object, *x: Tensor) -> Tensor:
        results = getattr(module, operator)(*x, mask="causal", softcap=2.0)
        results = [results] if isinstance(results, Tensor) else results
        return sum((r * r.cos()).sum() for r in results)

    function = getattr(torch.autograd.functional, product)
    moves = torch.tensor(0.7, dtype=torch.float64) if product == "vjp" else along
    found, wanted = (
        torch.utils._pytree.tree_leaves(function(functools.partial(loss, module), given, moves))
        for module in (attention_ops, reference)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


REFUSED = {
    "third derivative": lambda f, x: grad(lambda y: grad(lambda z: grad(f)(z).sum())(y).sum())(x),
    "forward over forward": lambda f, x: jvp(lambda y: jvp(f, (y,), (x,))[1], (x,), (x,)),
    "forward over two reverses": lambda f, x: jvp(lambda y: grad(lambda z: grad(f)(z).sum())(y), (x,), (x,)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("operator", ["attention", "attention_weights", "attention_summaries"])
def test_higher_derivatives_name_the_way(operator, name):
    def function(x: Tensor) -> Tensor:
        results = getattr(attention_ops, operator)(*[x] * (3 if operator == "attention" else 2))
        return sum(r.square().sum() for r in ([results] if isinstance(results, Tensor) else results))

    with pytest.raises(NotImplementedError, match=r"attention_ops::_attention_\w+: expected .*attention_ops.reference"):
        REFUSED[name](function, torch.randn(1, 1, 3, 4, dtype=torch.float64))
