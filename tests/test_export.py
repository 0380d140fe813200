"""torch.export: batch and lengths stay open, with masks that carry tensors, down to sizes of 1."""

import dataclasses
from collections.abc import Callable

import cases
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import attention_ops
from attention_ops import masks

MAKERS = {**cases.KINDS, **cases.SQUARE_KINDS}
WITH_DATA = [name for name, make in MAKERS.items() if make(cases.SHAPES[0]).data]
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


class Masked(nn.Module):
    """Attention whose mask's tensors are inputs of the program."""

    def __init__(self, mask: masks.Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, data: list[Tensor]) -> list[Tensor]:
        mask = masks.causal() | dataclasses.replace(self.mask, data=tuple(data))
        weights = attention_ops.attention_weights(query, key, mask=mask, average=True)
        summaries = attention_ops.attention_summaries(query, key, mask=mask)
        return [*attention_ops.attention(query, key, value, mask=mask, return_lse=True), weights, *summaries]


def arguments(name: str, batch: int, queries: int, keys: int) -> tuple:
    shape = cases.Shape(batch, HEADS, KEY_HEADS, queries, keys, WIDTH, WIDTH)
    sizes = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    data = list(MAKERS[name](shape).data)
    return *(torch.randn(batch, *size, WIDTH) for size in sizes), data


def export(module: nn.Module, example: tuple, square: bool) -> ExportedProgram:
    """Batch, query length and key length open; what the mask's tensors have of them follows."""
    batch, queries, keys = (Dim(name, min=1, max=4096) for name in ("batch", "queries", "keys"))
    query, key = {0: batch, 2: queries}, {0: batch, 2: queries if square else keys}
    data = [{d: Dim.AUTO for d in range(x.dim()) if x.shape[d] > 1} for x in example[3]]
    return torch.export.export(module, example, dynamic_shapes=(query, key, key, data))


@pytest.mark.parametrize("name", WITH_DATA)
def test_sizes_unlike_the_examples(name):
    square = name in cases.SQUARE_KINDS
    sizes = [(3, 5, 7), (1, 1, 1), (1, 40, 33), (2, 1, 50), (5, 17, 1)]
    module = Masked(MAKERS[name](cases.SHAPES[0]))
    exported = export(module, arguments(name, 2, 18, 18 if square else 34), square)
    for program, kept in ((exported, "attention"), (exported.run_decompositions(), "_attention_forward")):
        assert f"attention_ops.{kept}.default" in [str(node.target) for node in program.graph.nodes]
        for batch, queries, keys in sizes:
            given = arguments(name, batch, queries, queries if square else keys)
            torch.testing.assert_close(program.module()(*given), module(*given))


class Called(nn.Module):
    """A function as a module, which export wants."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


# What is called, and the axes of its arguments: b, q and k are open.
FUNCTIONS = {
    "bias": (lambda q, k, v, x: attention_ops.attention(q, k, v, bias=x), "b4q8 b2k8 b2k8 b1qk"),
    "no_batch": (lambda q, k, v: attention_ops.attention(q, k, v, mask="causal"), "4q8 2k8 2k8"),
    "no_heads": (lambda q, k, v: attention_ops.attention(q, k, v, mask="causal"), "q8 k8 k8"),
    "five_dimensions": (lambda q, k, v: attention_ops.attention(q, k, v, mask="causal"), "b34q8 132k8 b12k8"),
    "sdpa": (lambda q, k, v, x: attention_ops.scaled_dot_product_attention(q, k, v, x), "b4q8 b4k8 b4k8 b1qk"),
    "sdpa_five": (lambda q, k, v: attention_ops.scaled_dot_product_attention(q, k, v), "b34q8 b34k8 b34k8"),
    "dropout": (lambda q, k, v, x: attention_ops.attention(q, k, v, dropout_p=0.5, seed=x.long()), "b4q8 b2k8 b2k8 b2"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_arguments_at_sizes_unlike_the_examples(name):
    function, axes = FUNCTIONS[name]
    dims = {axis: Dim(f"open_{axis}", min=1, max=4096) for axis in "bqk"}

    def tensors(batch: int, queries: int, keys: int) -> list[Tensor]:
        sizes = {"b": batch, "q": queries, "k": keys}
        return [torch.randn([sizes[a] if a in sizes else int(a) for a in tensor]) for tensor in axes.split()]

    opened = tuple({d: dims[a] for d, a in enumerate(tensor) if a in dims} for tensor in axes.split())
    exported = torch.export.export(Called(function), tuple(tensors(2, 5, 7)), dynamic_shapes=(opened,))
    for program in (exported, exported.run_decompositions()):
        for sizes in ((1, 1, 1), (3, 9, 4), (5, 1, 3)):
            given = tensors(*sizes)
            torch.testing.assert_close(program.module()(*given), function(*given))
