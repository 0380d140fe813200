"""rope under torch: derivatives, vmap, opcheck, compile, export, autocast, casts of its module."""

import cases
import pytest
import torch
from torch import Tensor

from attention_ops import nn, reference, rope, rotary

OPS = torch.ops.attention_ops
LAYOUTS = ("half", "interleaved")


def double(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives(layout):
    frequencies = rotary.frequencies(4)._replace(factor=1.3)
    positions = torch.tensor([[0, 3, 5], [2, 1, 900]])

    def function(x: Tensor) -> Tensor:
        return rope(x, positions=positions, layout=layout, frequencies=frequencies)

    x = double(2, 2, 3, 5)
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, x, check_batched_grad=True, check_undefined_grad=True, **forward)
    assert torch.autograd.gradgradcheck(
        lambda x: function(x).square(), x, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )
    third = torch.func.jacfwd(torch.func.jacrev(torch.func.grad(lambda x: rope(x, layout=layout).pow(3).sum())))
    x = x.detach()[0, 0, :, :4]
    torch.testing.assert_close(third(x), third(x + 1))  # of a cubic


def test_the_gradient_turns_back():
    x, grad = double(2, 3, 7, 10), torch.randn(2, 3, 7, 10, dtype=torch.float64)
    out = rope(x, offset=11)
    torch.testing.assert_close(rope(out, positions=-torch.arange(11, 18)), x)
    (given,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(given, rope(grad, positions=-torch.arange(11, 18)), rtol=0, atol=0)


def test_forward_mode_is_the_operator_on_the_tangent():
    x, tangent = torch.randn(2, 2, 3, 4, 6).unbind(0)
    out, turned = torch.func.jvp(lambda x: rope(x, offset=3), (x,), (tangent,))
    assert torch.equal(out, rope(x, offset=3))
    assert torch.equal(turned, rope(tangent, offset=3))


def test_expanded_gradients_and_no_gradients():
    x = torch.randn(2, 2, 3, 4, requires_grad=True)
    rope(x).sum().backward()
    plain = x.detach().clone().requires_grad_()
    rope(plain).backward(torch.ones(2, 2, 3, 4))
    assert torch.equal(x.grad, plain.grad)
    with torch.no_grad():
        assert rope(x).grad_fn is None


def test_derivatives_that_are_not_there_are_refused():
    inverse = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x, positions = torch.randn(3, 4), torch.rand(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="positions and inv_freq without gradients or tangents"):
        rope(x, positions=positions)
    with pytest.raises(NotImplementedError, match=r"attention_ops\.reference"):
        rope(x, frequencies=rotary.Frequencies(inverse))
    reference.rope(x, rotary.Frequencies(inverse), positions=positions).sum().backward()
    assert positions.grad.abs().max() > 0
    assert inverse.grad.abs().max() > 0


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (2, 1)], ids=str)
def test_vmap_equals_a_loop(dims):
    xs, places = torch.randn(3, 2, 2, 5, 6), torch.randint(0, 99, (3, 2, 5))
    given = [t[0] if d is None else t.movedim(0, d) for t, d in zip((xs, places), dims, strict=True)]

    def function(x: Tensor, positions: Tensor) -> Tensor:
        return rope(x, positions=positions, rotary_dim=4)

    ours = torch.func.vmap(function, dims)(*given)
    wanted = [
        function(*(a if d is None else a.select(d, n) for a, d in zip(given, dims, strict=True))) for n in range(3)
    ]
    assert torch.equal(ours, torch.stack(wanted))


def test_vmap_of_gradients_and_the_older_vmap():
    xs = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    ours = torch.func.vmap(torch.func.grad(lambda x: rope(x, offset=2).pow(3).sum()))(xs)
    leaf = xs.clone().requires_grad_()
    wanted = torch.autograd.grad(rope(leaf, offset=2).pow(3).sum(), leaf)[0]
    torch.testing.assert_close(ours, wanted)
    out = rope(leaf)
    basis = torch.randn(4, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, leaf, basis, is_grads_batched=True, retain_graph=True)[0]
    for one, grad in zip(batched, basis, strict=True):
        assert torch.equal(one, torch.autograd.grad(out, leaf, grad, retain_graph=True)[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("strides", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(strides, requires_grad):
    x = cases.strided((2, 3, 5, 8), torch.float32, strides).requires_grad_(requires_grad)
    inverse, axes = rotary.axial(8).inverse, [0, 0, 1, 1]
    positions = torch.rand(2, 2, 5, dtype=torch.float64)
    torch.library.opcheck(OPS._rope_table.default, (positions, inverse, axes, 1.5, torch.float32))
    table = OPS._rope_table(positions, inverse, axes, 1.5, torch.float32)
    torch.library.opcheck(OPS._rope.default, (x, table, True, False))
    torch.library.opcheck(OPS._rope.default, (x, table[:1], False, True))
    torch.library.opcheck(OPS.rope.default, (x, inverse, torch.randint(0, 9, (2, 2, 5)), 3, axes))
    torch.library.opcheck(OPS.rope.default, (x, inverse))


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (3, 5, 8), (5, 8), (2, 2, 3, 5, 8)], ids=str)
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(shape):
    x = torch.randn(shape)
    real, meta = rope(x), rope(x.to("meta"))
    assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


FUNCTIONS = {
    "offset": lambda x: rope(x, offset=x.shape[0]),
    "positions": lambda x: rope(x, positions=torch.arange(x.shape[2]).expand(x.shape[0], -1), layout="interleaved"),
    "offsets": lambda x: rope(x, offset=torch.arange(x.shape[0])),
    "yarn": lambda x: rope(x, scaling=rotary.YaRN(4.0, 32)),
    "llama3": lambda x: rope(x, scaling=rotary.Llama3(8.0, 64)),
    "dynamic": lambda x: rope(x, scaling=rotary.DynamicNTK(2.0, 35)),
    "long": lambda x: rope(x, scaling=rotary.LongRoPE((1.0,) * 8, (4.0,) * 8, 35, 99)),
    "axial": lambda x: rope(x[:, :, :30], positions=rotary.grid(5, 6), frequencies=rotary.axial(16)),
    "module": nn.RotaryEmbedding(8),
}


@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in FUNCTIONS), ("offset", "inductor")])
def test_compiled_equals_eager_without_breaks_or_recompilations(name, backend):
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], backend=backend, fullgraph=True, dynamic=True)
    for number, (batch, length) in enumerate(((2, 33), (3, 40), (4, 65))):
        x = torch.randn(batch, 4, length, 16, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            ours, wanted = compiled(x), FUNCTIONS[name](x)
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
        grad = torch.randn_like(ours)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, wanted)), rtol=1e-6, atol=1e-6)


def test_export_with_a_dynamic_length():
    length = torch.export.Dim("length", min=2, max=4096)
    module = nn.RotaryEmbedding()
    exported = torch.export.export(module, (torch.randn(2, 3, 9, 8),), dynamic_shapes={"x": {2: length}}, strict=True)
    for program in (exported, exported.run_decompositions()):
        assert sum("attention_ops" in str(node.target) for node in program.graph.nodes) <= 2  # the table, the rows
        for size in (9, 50):
            x = torch.randn(2, 3, size, 8)
            torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_no_angle(dtype):
    x = torch.randn(1, 2, 9, 8)
    wanted = rope(x, offset=30001), rope(x.to(dtype), offset=30001)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(rope(x, offset=30001), wanted[0])
        assert torch.equal(rope(x.to(dtype), offset=30001), wanted[1])


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_a_module_that_was_cast_is_as_right_as_before(cast):
    module, x = getattr(nn.RotaryEmbedding(scaling=rotary.YaRN(2.0, 64)), cast)(), torch.randn(1, 1, 3, 16)
    assert torch.equal(module(x, offset=1857), rope(x, offset=1857, scaling=rotary.YaRN(2.0, 64)))
    assert not list(module.buffers())
    assert "YaRN" in repr(module)
