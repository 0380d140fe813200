"""Forward mode and second derivatives on CUDA: on the model that runs the kernels without a GPU, and on a GPU."""

import dataclasses
import itertools

import cases
import pytest
import test_derivatives
import torch
from backends import HAS_GPU, assert_replays, less_memory_than, on_model
from torch import Tensor
from torch.func import hessian, jvp

import attention_ops
from attention_ops import reference

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def check(case: cases.Case, device: str) -> None:
    test_derivatives.check(case, attention_ops.attention, reference.attention, return_lse=True, device=device)


SHAPES = [
    cases.Shape(1, 1, 1, 1, 1, 1, 1),
    cases.Shape(2, 2, 1, 17, 17, 8, 8),
    cases.Shape(1, 2, 1, 17, 65, 3, 5),
    cases.Shape(1, 1, 1, 65, 7, 8, 33),
    cases.Shape(1, 1, 1, 70, 70, 3, 2),
]
SMALL = [
    dataclasses.replace(case, shape=shape)
    for case, shape in zip(cases.CASES[::3], itertools.cycle(SHAPES), strict=False)
]


@pytest.mark.parametrize("case", [case for case in SMALL if case.possible], ids=str)
def test_small(case, device):
    check(case, device)


@needs_gpu
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_grid(case):
    check(case, "cuda")


@pytest.mark.parametrize("mask", [name for name in cases.MASKS if name != "no_mask"])
def test_every_mask(mask, device):
    check(cases.Case(cases.Shape(1, 2, 1, 20, 20, 4, 3), mask=mask, softcap=2.5), device)


@pytest.mark.parametrize("bias", [name for name in cases.BIASES if name != "no_bias"])
def test_every_bias(bias, device):
    check(cases.Case(cases.Shape(2, 1, 1, 17, 20, 4, 3), mask="causal", bias=bias, dropout_p=0.3), device)


def test_several_tiles(device):
    check(cases.Case(cases.Shape(1, 1, 1, 100, 100, 3, 2), mask="document", bias="bias_keys", sinks=True), device)


@pytest.mark.parametrize("width", [65, 100])
def test_wide_rows(width, device):
    check(cases.Case(cases.Shape(1, 1, 1, 17, 17, width, 5), mask="causal"), device)
    check(cases.Case(cases.Shape(1, 1, 1, 17, 17, 5, width), dtype=torch.bfloat16), device)


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape, device):
    for dtype in (torch.float32, torch.bfloat16):
        check(cases.Case(shape, mask="causal", bias="bias", sinks=True, dtype=dtype), device)


@pytest.mark.parametrize("name", test_derivatives.DIFFERENTIABLE)
def test_gradcheck_and_gradgradcheck(name, device):
    """Of one input at a time: on the model every call costs much."""
    tensors = {n: t[:1].to(device) if n != "sinks" else t.to(device) for n, t in cases.small_inputs().items()}
    seed = torch.tensor([3], device=device)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        named = {**tensors, name: x}
        return attention_ops.attention(**named, mask="causal", softcap=1.5, dropout_p=0.25, seed=seed, return_lse=True)

    leaf, fast = tensors[name].requires_grad_(), {"fast_mode": device == "cpu"}
    assert torch.autograd.gradcheck(function, leaf, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(function, leaf, check_fwd_over_rev=True, check_rev_over_rev=True, **fast)


def test_a_hessian_is_that_of_the_formula(device):
    """Through vmap, of forward mode over reverse mode."""
    given = [torch.randn(size, dtype=torch.float64).to(device) for size in ((1, 2, 2, 1), (1, 1, 3, 1), (1, 1, 3, 1))]
    found, wanted = (
        torch.utils._pytree.tree_leaves(hessian(test_derivatives.loss_of(function), (0, 1, 2))(*given))
        for function in (attention_ops.attention, reference.attention)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_masked_reaches_no_derivative(value, dtype, device):
    test_derivatives.check_masked(value, dtype, device, heads=(1, 1), lengths=(40, 20))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fill", [-1e4, "lowest"])
def test_a_row_of_one_huge_number_moves_as_without_it(fill, dtype, device):
    """lse cannot hold the logarithm of the sum beside it, so that every pass has to count again."""
    query, key, value = torch.zeros(1, 1, 5, 4), torch.randn(1, 1, 70, 4), torch.randn(1, 1, 70, 3)
    given = [t.to(dtype).to(device) for t in (query, key, value)]
    along = [torch.randn_like(t) for t in given]
    bias = torch.full((5, 70), torch.finfo(dtype).min if fill == "lowest" else fill, dtype=dtype, device=device)

    def gradients(function, *x: Tensor, **options: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in x]
        first = torch.autograd.grad(function(*leaves, **options).sum(), leaves, create_graph=True)
        second = sum((g * a).sum() for g, a in zip(first, along, strict=True))
        return (*first, *torch.autograd.grad(second, leaves))

    found = [jvp(lambda *x: attention_ops.attention(*x, bias=bias), tuple(given), tuple(along))[1]]
    wanted = [jvp(reference.attention, tuple(given), tuple(along))[1]]
    if fill != "lowest":  # beside which the scores' own changes are lost, in the formula too
        found += gradients(attention_ops.attention, *given, bias=bias)
        wanted += gradients(reference.attention, *given)
    near = {"rtol": 0.02, "atol": 0.02} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-4}
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **near)


@pytest.mark.parametrize("schedule", [(1, 1, 1, True), (2, 2, 7, True)], ids=str)
def test_any_schedule_gives_the_same_bits(schedule):
    """Threads and blocks in any order."""
    case = cases.Case(cases.Shape(1, 2, 1, 70, 17, 5, 3), "causal", "bias_keys", sinks=True, dropout_p=0.1)
    inputs, draw, results = cases.make(case), {}, []
    for chosen in ((0, 0, 1, True), schedule):
        with on_model(*chosen):
            found = test_derivatives.first_and_second(attention_ops.attention, inputs, draw, return_lse=True)
        results.append(list(found.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
def test_memory_is_linear_in_the_length():
    leaves = [torch.randn(1, 1, 16384, 16, device="cuda", requires_grad=True) for _ in range(3)]

    def loss(*x: Tensor) -> Tensor:
        return attention_ops.attention(*x, mask="causal", softcap=5.0).square().sum()

    with less_memory_than(64):
        jvp(loss, tuple(t.detach() for t in leaves), tuple(t.detach() for t in leaves))
        grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


@needs_gpu
@pytest.mark.parametrize("size", [(70000, 1, 2, 4), (1, 70000, 2, 4)], ids=str)
def test_many_batches_and_heads(size):
    given = tuple(torch.randn(size, device="cuda") for _ in range(3))
    found, wanted = (jvp(module.attention, given, given)[1] for module in (attention_ops, reference))
    torch.testing.assert_close(found, wanted)


@needs_gpu
def test_a_graph_replays_a_second_derivative():
    leaves = [torch.randn(2, 2, 100, 64, device="cuda", requires_grad=True) for _ in range(3)]

    def step() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(
            attention_ops.attention(*leaves, mask="causal").square().sum(), leaves, create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    assert_replays(step, leaves)
