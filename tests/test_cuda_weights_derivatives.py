"""Forward mode and second derivatives of weights and summaries on CUDA: on the model, and on a GPU."""

import dataclasses
import itertools

import cases
import pytest
import test_attention_weights
import torch
from backends import HAS_GPU
from test_cuda_weights import CASES
from test_derivatives import check
from torch import Tensor

from attention_ops import attention_summaries, attention_weights, reference

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
SHAPES = [
    cases.Shape(2, 2, 1, 17, 17, 8, 1),
    cases.Shape(1, 1, 1, 1, 1, 1, 1),
    cases.Shape(1, 2, 1, 17, 65, 3, 1),
    cases.Shape(1, 1, 1, 65, 7, 8, 1),
]
SMALL = [
    case
    for case in (dataclasses.replace(c, shape=s) for c, s in zip(CASES[::3], itertools.cycle(SHAPES), strict=False))
    if case.possible
]


def check_weights(case: cases.Case, device: str, **more: object) -> None:
    check(case, attention_weights, reference.attention_weights, without=cases.OF_VALUES, device=device, **more)


def check_summaries(case: cases.Case, device: str) -> None:
    check(case, attention_summaries, reference.attention_summaries, without=cases.OF_VALUES, device=device)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_weights(case, device):
    check_weights(case, device)


@pytest.mark.parametrize("case", [case for case in SMALL if test_attention_weights.no_ties(case)], ids=str)
def test_summaries(case, device):
    check_summaries(case, device)


SELECTIONS = list(itertools.product((False, True), (None, torch.tensor([1, 0])), (None, torch.tensor([7, 2]))))


@pytest.mark.parametrize(("average", "heads", "rows"), SELECTIONS)
def test_a_mean_of_some_heads_and_rows(average, heads, rows, device):
    def ours(*args: Tensor, **options: object) -> Tensor:
        chosen = {"heads": heads, "rows": rows}
        moved = {name: index.to(device) for name, index in chosen.items() if index is not None}
        return attention_weights(*args, **{**options, **moved})

    case = cases.Case(cases.Shape(1, 2, 1, 9, 17, 4, 1), mask="block_sparse", bias="bias")
    more = {"average": average, "heads": heads, "rows": rows}
    check(case, ours, reference.attention_weights, without=cases.OF_VALUES, device=device, **more)


@pytest.mark.parametrize("mask", ["document", "window"])
def test_several_tiles(mask, device):
    case = cases.Case(cases.Shape(1, 1, 1, 70, 70, 5, 1), mask=mask, bias="bias_keys", softcap=2.5)
    check_weights(case, device)
    check_summaries(case, device)


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape, device):
    case = cases.Case(shape, mask="causal", bias="bias", sinks=True)
    check_weights(case, device)
    check_summaries(case, device)


@pytest.mark.parametrize("name", ["query", "key", "bias", "sinks"])
def test_gradgradcheck(name, device):
    """Of one input at a time: on the model every call costs much."""
    sizes = {"query": (1, 2, 2, 2), "key": (1, 1, 3, 2), "bias": (1, 2, 2, 3), "sinks": (2,)}
    tensors = {n: torch.randn(size, dtype=torch.float64, device=device) for n, size in sizes.items()}

    def function(x: Tensor) -> tuple[Tensor, ...]:
        options = {**tensors, name: x, "mask": "causal", "softcap": 1.5}
        return attention_weights(**options), *attention_summaries(**options)

    x = tensors[name].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_whole_grid(case):
    check_weights(case, "cuda")
    if test_attention_weights.no_ties(case):
        check_summaries(case, "cuda")
