"""What torch asks of an operator: opcheck, autocast, meta tensors, copies, modes."""

import copy

import cases
import pytest
import torch
from torch import Tensor

import attention_ops
from attention_ops import masks

OPS = torch.ops.attention_ops
OPTIONS = [  # memory layout, every option or none, requires_grad
    ("contiguous", False, True),
    ("contiguous", True, False),
    ("transposed", True, True),
    ("sliced", False, False),
    ("sliced", True, True),
]


def shared(strides: str, rich: bool, requires_grad: bool, value_width: int = 3) -> list:
    """The arguments that every private operator starts with."""
    sizes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, value_width))
    query, key, value = (cases.strided(size, torch.float32, strides).requires_grad_(requires_grad) for size in sizes)
    bias = torch.randn(1, 4, 5, 1).requires_grad_(requires_grad) if rich else None
    distance = torch.randn(2, 1, 11, 1 + 8 + value_width).requires_grad_(requires_grad) if rich else None
    sinks = torch.randn(4).requires_grad_(requires_grad) if rich else None
    data = [torch.tensor([7, 4]), torch.rand(2, 1, 5, 7) < 0.8] if rich else []
    dropout = (0.25, torch.tensor([5])) if rich and value_width else (0.0, None)
    return [
        query,
        key,
        value,
        bias,
        distance,
        sinks,
        data,
        "causal & padding | dense" if rich else "",
        0.3,
        1.5,
        *dropout,
    ]


def plain(args: list) -> list:
    return [a.detach() if isinstance(a, Tensor) else a for a in args]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck_attention(options):
    args = shared(*options)
    torch.library.opcheck(OPS._attention_forward.default, args)
    out, lse = OPS._attention_forward(*plain(args))
    rich, grad_out = options[1], torch.randn(2, 5, 4, 3).transpose(1, 2)
    for *grads, needed in (
        (grad_out, None, [True, True, True, rich, rich, rich]),
        (None, torch.randn_like(lse), [False, True, False, rich, True, False]),
    ):
        backward = (*plain(args), out, lse, *grads)
        torch.library.opcheck(OPS._attention_backward.default, (*backward, needed))
        tangents = [torch.randn_like(args[0]), None, torch.randn_like(args[2]), args[3], args[4], None]
        moved = [args[0].detach().requires_grad_(options[2]), *plain(args[1:])]
        torch.library.opcheck(OPS._attention_jvp.default, (*moved, out, lse, *plain(tangents)))
        double = (*backward, *plain(tangents), grads[0], None, [*needed, True, False])
        torch.library.opcheck(OPS._attention_double_backward.default, double)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck_weights(options):
    average = options[0] == "transposed"
    args = shared(*options, value_width=0)
    args[5] = None  # sinks act through lse
    lse = torch.randn(2, 4, 5).requires_grad_(options[2])
    chosen = (torch.tensor([0, 1, 2, 3]), torch.tensor([4, 0, 1, 2, 3])) if options[1] else (None, None)
    torch.library.opcheck(OPS._attention_weights.default, (*args, lse, *chosen, 5, average))
    grad = torch.randn(2, 5, 7) if average else torch.randn(2, 4, 5, 7)
    needed = [True, True, options[1], options[1], True]
    args = (*plain(args), lse.detach(), *chosen, 5, average)
    torch.library.opcheck(OPS._attention_weights_backward.default, (*args, grad, needed))
    tangents = (torch.randn_like(args[0]), None, args[3], args[4], torch.randn_like(lse))
    torch.library.opcheck(OPS._attention_weights_jvp.default, (*args, *tangents))
    torch.library.opcheck(OPS._attention_weights_double_backward.default, (*args, grad, *tangents, grad, needed))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck_summaries(options):
    args = shared(*options, value_width=0)
    args[5] = None
    lse = torch.randn(2, 4, 5).requires_grad_(options[2])
    torch.library.opcheck(OPS._attention_summaries.default, (*args, lse))
    args, lse = plain(args), lse.detach()
    argmax = OPS._attention_summaries(*args, lse)[3]
    for grads in ((torch.randn(2, 4, 7), None, None), (None, torch.randn(2, 4, 5), torch.randn(2, 4, 5))):
        needed = [True, True, options[1], options[1], True]
        torch.library.opcheck(OPS._attention_summaries_backward.default, (*args, lse, argmax, *grads, needed))
        tangents = (None, torch.randn_like(args[1]), args[3], args[4], None)
        torch.library.opcheck(OPS._attention_summaries_jvp.default, (*args, lse, argmax, *tangents))
        double = (*args, lse, argmax, *grads, *tangents, *grads, needed)
        torch.library.opcheck(OPS._attention_summaries_double_backward.default, double)


@pytest.mark.parametrize("seed", [torch.tensor([3]), torch.tensor([[3, 0], [4, 9]])], ids=str)
def test_opcheck_dropout_mask(seed):
    torch.library.opcheck(OPS._dropout_mask.default, (seed, 2, 3, 5, 9, 0.25))
    torch.library.opcheck(OPS.dropout_mask.default, (seed, 2, 3, 5, 9, 0.25))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_opcheck_public_operators():
    query, key, value, bias, distance, sinks, data, mask = shared("contiguous", True, True)[:8]
    tables = dict(zip(("distance_bias", "relative_key", "relative_value"), distance.split((1, 8, 3), -1), strict=True))
    tables["distance_bias"] = tables["distance_bias"][..., 0]
    torch.library.opcheck(OPS.attention.default, (query, key, value, data, mask, bias, sinks, 0.3, 1.5), tables)
    torch.library.opcheck(OPS.attention.plain, (query, key, value, "causal"))
    del tables["relative_value"]
    torch.library.opcheck(OPS.attention_weights.default, (query, key, data, mask, bias, sinks), tables)
    torch.library.opcheck(OPS.attention_summaries.default, (query, key, data, mask, bias, sinks), tables)


def test_the_plain_operator_is_the_operator_without_options():
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    for mask in ("", "causal"):
        plain, full = OPS.attention(query, key, value, mask), OPS.attention(query, key, value, [], mask)
        assert all(torch.equal(a, b) for a, b in zip(plain, full, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, compiled):
    """Float32 inputs are computed in the half type, gradients come back in float32."""
    torch._dynamo.reset()

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_ops.attention(query, key, value, mask="causal")

    call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    leaves = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype=dtype):
        out = call(*leaves)
    assert out.dtype == dtype
    assert torch.equal(out, function(*(t.to(dtype) for t in leaves)))
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)


def test_autocast_of_mixed_types_and_of_float64():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_ops.attention(query, key, key).dtype == torch.bfloat16
        assert attention_ops.attention_weights(query, key).dtype == torch.bfloat16
        assert attention_ops.attention(*[query.double()] * 3).dtype == torch.float64


def test_autocast_of_tangents_and_of_second_derivatives():
    """They are those of the half type."""
    key, value = torch.randn(2, 1, 2, 9, 8)

    def cast(query: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention_ops.attention(query, key, value, mask="causal")

    def by_hand(query: Tensor) -> Tensor:
        return attention_ops.attention(*(x.bfloat16() for x in (query, key, value)), mask="causal")

    def twice(function):
        first = torch.func.grad(lambda x: function(x).float().square().sum())
        return torch.func.grad(lambda x: first(x).square().sum())

    query, tangent = torch.randn(2, 1, 2, 9, 8)
    ours, wanted = (torch.func.jvp(f, (query,), (tangent,))[1] for f in (cast, by_hand))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, wanted)
    assert torch.equal(twice(cast)(query), twice(by_hand)(query))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.mask = masks.causal()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
        return attention_ops.attention(query, key, value, mask=self.mask)


def test_modules_with_masks_are_copied():
    layer = Layer()
    x = torch.randn(1, 5, 8)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_masks_with_data_are_copied():
    mask = masks.causal() & masks.padding(torch.tensor([3]))
    twin = copy.deepcopy(mask)
    assert twin.spec == mask.spec
    assert twin.data[0] is not mask.data[0]
    assert torch.equal(twin.dense(1, 1, 4, 4), mask.dense(1, 1, 4, 4))


@pytest.mark.parametrize("strides", cases.AXES["strides"])
def test_meta_tensors_have_the_shapes_types_and_strides_of_real_ones(strides):
    inputs = cases.make(
        cases.Case(cases.Shape(2, 4, 2, 5, 7, 8, 3), bias="bias", distance="relative", sinks=True, strides=strides)
    )

    def everything(device: str) -> list[Tensor]:
        tensors = {name: t.detach().to(device).requires_grad_() for name, t in inputs.tensors.items()}
        out, lse = attention_ops.attention(**tensors, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), list(tensors.values()))
        tensors = {name: t for name, t in tensors.items() if name not in cases.OF_VALUES}
        weights = attention_ops.attention_weights(**tensors)
        return [out, lse, *grads, weights, *attention_ops.attention_summaries(**tensors)]

    for real, meta in zip(everything("cpu"), everything("meta"), strict=True):
        assert meta.device.type == "meta"
        assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


def test_inference_mode_and_no_grad():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    wanted = attention_ops.attention(query, query, query).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attention_ops.attention(query, query, query)
        assert out.grad_fn is None
        assert torch.equal(out, wanted)


def test_deterministic_algorithms():
    """The setting is accepted, changes no bit, and what it fills fresh memory with is never left."""
    inputs = cases.make(cases.Case(cases.SHAPES[3], "padding", "bias_keys", "relative", sinks=True, dropout_p=0.3))

    def everything() -> list[Tensor]:
        out, lse = attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True)
        given = {name: x for name, x in inputs.tensors.items() if name not in cases.OF_VALUES}
        weights = attention_ops.attention_weights(**given, mask=inputs.options["mask"])
        summaries = attention_ops.attention_summaries(**given, mask=inputs.options["mask"])
        results = [out, lse.nan_to_num(neginf=0), weights, *summaries]
        grads = torch.autograd.grad(sum(x.square().sum() for x in results), list(inputs.tensors.values()))
        return [*results, *grads]

    wanted = everything()
    torch.use_deterministic_algorithms(True)
    try:
        ours = everything()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(ours, wanted, strict=True))


def test_an_input_changed_in_place_is_noticed():
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    key = torch.randn(1, 1, 3, 4)
    out = attention_ops.attention(query, key, key)
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_backward_needs_retain_graph():
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    out = attention_ops.attention(query, query, query)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
