"""rope's CUDA kernels: on the model that runs them without a GPU, and on a GPU, by the tests of the processor's."""

import itertools

import cases
import pytest
import test_rope
import torch
from backends import HAS_GPU, assert_replays, on_model
from test_rope import FAR_PLACES, LAYOUTS, PLACES, TYPES, WIDTHS

from attention_ops import reference, rope, rotary

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("width", "rotary_dim"), WIDTHS)
def test_equals_a_loop(layout, dtype, width, rotary_dim, device):
    test_rope.check_against_a_loop(layout, dtype, width, rotary_dim, device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_angles_are_exact(dtype, place, device):
    test_rope.check_angles(dtype, place, device)


@pytest.mark.parametrize("place", FAR_PLACES)
def test_angles_beyond_the_fast_range(place, device):
    test_rope.check_far_angles(place, device, least=3e-16)  # two units of the last place, as CUDA's own functions


SHAPES = [(1, 1, 1, 1), (2, 3, 17, 17), (3, 1, 65, 34), (1, 4, 100, 9)]


@pytest.mark.parametrize("positions", ["none", "shared", "each", "between"])
@pytest.mark.parametrize("strides", cases.AXES["strides"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_strides_and_positions(shape, strides, positions, device):
    for seed, (dtype, layout) in enumerate(itertools.product(TYPES, LAYOUTS)):
        case = {"shape": shape, "strides": strides, "dtype": dtype, "layout": layout, "part": 0.8}
        test_rope.check_rows({**case, "positions": positions, "seed": seed}, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [12, 1042])
def test_axes_and_a_factor(width, layout, device):
    """Of more pairs than one launch is told the axes of, too."""
    pairs = width // 2 - 1
    axes = tuple(torch.randint(0, 3, (pairs,)).tolist())
    frequencies = rotary.frequencies(2 * pairs)._replace(factor=1.25, axes=axes)
    x, positions = torch.randn(2, 2, 7, width), torch.randint(0, 5000, (2, 3, 7))
    there = frequencies._replace(inverse=frequencies.inverse.to(device))
    out = rope(x.to(device), frequencies=there, positions=positions.to(device), layout=layout).cpu()
    exact = reference.rope(x.double(), frequencies, positions=positions, layout=layout)
    test_rope.assert_rounded(out, exact, 1.25 * x.abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_turns_back(layout, device):
    x, grad = torch.randn(2, 2, 3, 17, 10, dtype=torch.float64, device=device).unbind(0)
    x.requires_grad_()
    out = rope(x, offset=11, layout=layout)
    (given,) = torch.autograd.grad(out, x, grad, create_graph=True)
    back = -torch.arange(11, 28, device=device)
    torch.testing.assert_close(given, rope(grad, positions=back, layout=layout), rtol=0, atol=0)
    torch.testing.assert_close(rope(out, positions=back, layout=layout), x)
    turned = torch.func.jvp(lambda x: rope(x, offset=11, layout=layout), (x,), (grad,))[1]
    torch.testing.assert_close(turned, rope(grad, offset=11, layout=layout), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 4), (3, 0)], ids=str)
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    out = rope(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_does_not_turn_keeps_its_bits(dtype, device):
    x = torch.arange(-(1 << 15), 1 << 15, 7).to(torch.int16).view(dtype)
    x = x[x.isfinite() & ((x == 0) | (x.float().abs() >= torch.finfo(torch.float32).tiny))]
    x = x[: len(x) // 16 * 16].reshape(1, -1, 1, 16)
    assert torch.equal(rope(x.to(device)).cpu(), x)
    special = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf, 3.0]]).to(dtype)
    turned = rope(special.to(device), rotary_dim=2, layout="interleaved").cpu()
    assert turned[0, :2].isnan().all()
    assert torch.equal(turned[0, 2:], special[0, 2:])


@pytest.mark.parametrize("schedule", [(1, 1, 1, True), (2, 2, 7, True)], ids=str)
def test_any_schedule_gives_the_same_bits(schedule):
    x, results = torch.randn(2, 3, 33, 20), []
    for chosen in ((0, 0, 1, True), schedule):
        with on_model(*chosen):
            results.append(rope(x, offset=5))
    assert torch.equal(*results)


@needs_gpu
@pytest.mark.parametrize("size", [(70000, 1, 2, 4), (1, 70000, 2, 4)], ids=str)
def test_many_batches_and_heads(size):
    x = torch.randn(size)
    torch.testing.assert_close(rope(x.cuda()).cpu(), rope(x))


@needs_gpu
def test_offsets_past_32_bits():
    stride = 2**30 + 12345 * 8
    storage = torch.empty(2 * stride + 4096, dtype=torch.bfloat16, device="cuda")
    x = torch.as_strided(storage, (1, 3, 8, 16), (0, stride, 16, 1))
    x.copy_(torch.randn(1, 3, 8, 16))
    assert torch.equal(rope(x), rope(x.clone()))


@needs_gpu
def test_a_graph_replays():
    x = torch.randn(2, 2, 100, 64, device="cuda")
    frequencies, positions = rotary.axial(64, device="cuda"), rotary.grid(10, 10, device="cuda").double()
    assert_replays(lambda: [rope(x, frequencies=frequencies, positions=positions)], [x])
