"""attention: values and every gradient against the formula in float64."""

import itertools
from collections.abc import Callable

import cases
import pytest
import torch
from compare import GRADIENT, OUTPUT, assert_close, assert_exact
from torch import Tensor

import attention_ops
from attention_ops import masks, reference

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(DIFFERENTIABLE, n)]


def run(function: Callable, inputs: cases.Inputs, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """out, lse, and the gradient of every input of one call."""
    out, lse = function(**inputs.tensors, **inputs.options, return_lse=True)
    grads = torch.autograd.grad(
        (out, lse), list(inputs.tensors.values()), (grad_out.to(out.dtype), grad_lse.to(lse.dtype)), allow_unused=True
    )
    zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(inputs.tensors.values(), grads, strict=True))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(inputs.tensors, zeros, strict=True))}


def check(case: cases.Case, device: str = "cpu") -> None:
    inputs, shape = cases.make(case), case.shape
    grad_out = cases.strided((shape.batch, shape.heads, shape.queries, shape.value_width), case.dtype, case.strides)
    grad_lse = torch.randn(shape.batch, shape.heads, shape.queries)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    ours = run(attention_ops.attention, inputs.on(device), cases.moved(grad_out, device), grad_lse.to(device))
    exact = run(reference.attention, inputs.to(torch.float64), grad_out, grad_lse)
    plain = run(reference.attention, inputs.to(case.dtype), grad_out, grad_lse)
    with torch.no_grad():
        plain["lse"] = reference.attention(**inputs.to(lse_dtype).tensors, **inputs.options, return_lse=True)[1]
    assert ours["lse"].dtype == lse_dtype
    for name, result in ours.items():
        result = result.cpu()
        assert result.dtype == inputs.tensors.get(name, ours[name]).dtype
        factor = OUTPUT if name in ("out", "lse") else GRADIENT
        assert_close(result, plain[name], exact[name], factor, name, cases.rows_summed(case, name, result))
    assert ours["out"].dtype == case.dtype


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_values_and_gradients(case):
    check(case)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", cases.COMPACT, ids=str)
def test_compact(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "dense", "padding"])
@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape, mask, dtype):
    check(cases.Case(shape, mask=mask, bias="bias", sinks=True, dtype=dtype))


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty_keeps_the_graph(shape):
    inputs = cases.make(cases.Case(shape))
    out = attention_ops.attention(**inputs.tensors)
    assert out.grad_fn is not None
    out.sum().backward()
    assert [t.grad.shape for t in inputs.tensors.values()] == [t.shape for t in inputs.tensors.values()]


def test_no_keys_gives_zeros_and_minus_infinity():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    out, lse = attention_ops.attention(query, key, key, return_lse=True)
    assert torch.equal(out, torch.zeros(1, 2, 3, 4))
    assert torch.equal(lse, torch.full((1, 2, 3), -torch.inf))


WIDTHS = (1, 2, 3, 5, 8, 12, 16, 20, 31, 33, 64, 80, 96, 100, 128, 129, 192, 256, 257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width, dtype):
    check(cases.Case(cases.Shape(1, 2, 1, 9, 11, width, 8), dtype=dtype, mask="causal"))
    check(cases.Case(cases.Shape(1, 2, 1, 9, 11, 8, width), dtype=dtype))


@pytest.mark.every_isa
@pytest.mark.parametrize("queries", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129])
def test_lengths(queries):
    for keys in (1, 8, 15, 63, 65, 128, 129, 200):
        check(cases.Case(cases.Shape(1, 1, 1, queries, keys, 16, 16), mask="causal"))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_long(dtype):
    check(cases.Case(cases.Shape(1, 2, 1, 300, 1100, 32, 32), mask="causal", bias="bias_keys", dtype=dtype))
    check(cases.Case(cases.Shape(2, 2, 1, 1, 3000, 32, 32), sinks=True, dtype=dtype))


@pytest.mark.every_isa
@pytest.mark.parametrize("mask", ["no_mask", "causal", "block_sparse", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        cases.Shape(1, 2, 1, 350, 600, 96, 96),
        cases.Shape(1, 5, 1, 350, 600, 40, 70),
        cases.Shape(4, 6, 2, 70, 70, 8, 8),
    ],
    ids=str,
)
def test_many_tiles_of_plain_scores(shape, dtype, mask):
    check(cases.Case(shape, mask=mask, dtype=dtype))


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_gradcheck_of_every_subset(subset):
    tensors = cases.small_inputs()
    for name in subset:
        tensors[name].requires_grad_()
    seed = torch.tensor([3])

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return attention_ops.attention(
            **{**tensors, **dict(zip(subset, args, strict=True))},
            mask="causal",
            softcap=1.5,
            dropout_p=0.25,
            seed=seed,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(function, [tensors[name] for name in subset], check_batched_grad=True)


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_each_gradient_iff_needed(subset):
    """The gradient of a subset is the one found when all are asked for, and the others get none."""
    tensors = cases.small_inputs()
    whole = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    attention_ops.attention(**whole, mask="causal").sum().backward()
    for name in subset:
        tensors[name].requires_grad_()
    attention_ops.attention(**tensors, mask="causal").sum().backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in subset)
        assert tensor.grad is None or torch.equal(tensor.grad, whole[name].grad), name


@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=4)), ids=str)
def test_bias_of_every_broadcast_shape(axes):
    tensors = cases.small_inputs()
    sizes = [1 if one else size for one, size in zip(axes, (2, 2, 3, 5), strict=True)]
    tensors["bias"] = torch.randn(sizes, dtype=torch.float64)
    inputs = cases.Inputs({name: t.requires_grad_() for name, t in tensors.items()}, {"mask": masks.causal()})
    grads = torch.randn(2, 2, 3, 2, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
    ours, exact = run(attention_ops.attention, inputs, *grads), run(reference.attention, inputs, *grads)
    for name in ours:
        assert_exact(ours[name], exact[name], name)


def test_bias_of_fewer_dimensions():
    query = torch.randn(2, 2, 3, 4)
    bias = torch.randn(3, 3, requires_grad=True)
    out = attention_ops.attention(query, query, query, bias=bias)
    out.sum().backward()
    assert torch.equal(out, attention_ops.attention(query, query, query, bias=bias[None, None]))
    assert bias.grad.shape == bias.shape


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 1, 3)], ids=str)
def test_leading_dimensions(leading):
    query, key, value = (torch.randn(*leading, n, d, dtype=torch.float64) for n, d in ((4, 5), (6, 5), (6, 2)))
    out, lse = attention_ops.attention(query, key, value, mask="causal", return_lse=True)
    flat = [t.reshape(-1, 1, *t.shape[-2:]) for t in (query, key, value)]
    exact, exact_lse = reference.attention(*flat, mask="causal", return_lse=True)
    assert_exact(out, exact.reshape(*leading, 4, 2), "out")
    assert_exact(lse, exact_lse.reshape(*leading, 4), "lse")


def test_batch_dimensions_broadcast():
    query, key = torch.randn(3, 1, 2, 4, 5, dtype=torch.float64), torch.randn(2, 2, 6, 5, dtype=torch.float64)
    out = attention_ops.attention(query, key, key)
    full = query.expand(3, 2, 2, 4, 5).flatten(0, 1), key.expand(3, 2, 2, 6, 5).flatten(0, 1)
    assert_exact(out, reference.attention(*full, full[1]).unflatten(0, (3, 2)))


@pytest.mark.parametrize("strides", cases.AXES["strides"])
def test_strides_of_results_depend_on_shapes_only(strides):
    inputs = cases.make(cases.Case(cases.Shape(2, 4, 2, 5, 7, 8, 6), bias="bias_sliced", strides=strides))
    out = attention_ops.attention(**inputs.tensors)
    grads = torch.autograd.grad(out.sum(), list(inputs.tensors.values()))
    assert out.transpose(1, 2).is_contiguous()
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads[:3])
    assert grads[3].is_contiguous()


def test_scale_zero_is_the_mean_and_a_negative_scale_negates():
    query, key, value = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64).unbind(0)
    mean = attention_ops.attention(query, key, value, scale=0.0)
    assert_exact(mean, value.mean(2, keepdim=True).expand_as(value))
    negated = attention_ops.attention(-query, key, value, scale=0.3)
    assert_exact(attention_ops.attention(query, key, value, scale=-0.3), negated)


def test_default_scale_knows_the_true_width():
    query, key = torch.randn(2, 1, 1, 3, 5, dtype=torch.float64).unbind(0)
    wanted = attention_ops.attention(query, key, key, scale=5**-0.5)
    assert torch.equal(attention_ops.attention(query, key, key), wanted)


def test_lse_of_an_empty_row_is_the_sink():
    query, sinks = torch.randn(1, 2, 3, 4), torch.tensor([0.5, -2.0], requires_grad=True)
    out, lse = attention_ops.attention(
        query, query, query, sinks=sinks, mask=masks.sliding_window(0, -1), return_lse=True
    )
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.allclose(lse, sinks.detach()[None, :, None].expand(1, 2, 3), rtol=1e-6)
    lse.sum().backward()
    assert torch.allclose(sinks.grad, torch.full((2,), 3.0))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("keys", [1056, 1057])
def test_gradient_of_a_bias_larger_than_the_caches(keys, batch, dtype):
    """All heads' goes past the caches where its rows are whole lines, and that of one head does not."""
    query, grad_out = torch.randn(2, batch, 6, 1010, 8).to(dtype)
    key, value = torch.randn(2, batch, 6, keys, 8).to(dtype)
    bias = torch.randn(1, 6, 1010, keys).to(dtype)

    def gradient(heads: slice) -> Tensor:
        given = bias[:, heads].clone().requires_grad_()
        out = attention_ops.attention(query[:, heads], key[:, heads], value[:, heads], bias=given, mask="causal")
        return torch.autograd.grad(out, given, grad_out[:, heads])[0]

    assert torch.equal(gradient(slice(6)), torch.cat([gradient(slice(h, h + 1)) for h in range(6)], 1))


@pytest.mark.every_isa
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 6e-7), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("queries", [1, 2000])
def test_softcap_is_tanh_over_the_whole_range(queries, dtype, rtol):
    """With one key lse is the capped score: a small one as it is, a far one the cap. The cap is so large that an error
    of lse itself, 1e-7 at a score of 0, is none."""
    cap = 2.0**27
    grid = (torch.logspace(-8, 29, 999), torch.linspace(0.01, 12, 1000), torch.tensor([torch.inf]))
    units = torch.cat([sign * x.to(dtype) for x in grid for sign in (1, -1)])
    query = (units * cap).view(1, -1, queries, 1)
    one = torch.ones(1, query.shape[1], 1, 1, dtype=dtype)
    options = {"scale": 1.0, "softcap": cap, "return_lse": True}
    out, lse = attention_ops.attention(query, one, one, **options)
    torch.testing.assert_close(lse.flatten(), (cap * units.double().tanh()).to(dtype), rtol=rtol, atol=0)
    assert lse.abs().max() <= cap * (1 + rtol / 4)
    assert torch.equal(out, torch.ones_like(query))

    for lost in attention_ops.attention(query * torch.nan, one, one, **options):
        assert lost.isnan().all()


@pytest.mark.every_isa
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_slope_of_softcap_over_the_whole_range(dtype, atol):
    units = torch.cat([torch.logspace(-8, 29, 999), torch.linspace(-12, 12, 1000), torch.tensor([torch.inf])]).to(dtype)
    query, one = units[:, None].clone().requires_grad_(), torch.ones(1, 1, dtype=dtype)
    _, lse = attention_ops.attention(query, one, one, scale=1.0, softcap=1.0, return_lse=True)
    (slope,) = torch.autograd.grad(lse.sum(), query)
    torch.testing.assert_close(slope[:, 0], (units.double().cosh() ** -2).to(dtype), rtol=0, atol=atol)
    assert (slope >= 0).all()


def test_float32_bias_with_half_inputs_gets_a_float32_gradient():
    query = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    bias = torch.randn(1, 1, 5, 5, requires_grad=True)
    attention_ops.attention(query, query, query, bias=bias).sum().backward()
    assert bias.grad.dtype == torch.float32
    assert bias.grad.shape == bias.shape
