"""rope: against a plain loop and against exact angles, positions and offsets of every form, errors."""

import cmath
import itertools
import math

import cases
import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_errors import refuses
from torch import Tensor

from attention_ops import position, reference, rope, rotary

LAYOUTS = ("half", "interleaved")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def by_loop(x: Tensor, positions: Tensor, layout: str, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """[B, H, L, D] and [B, L], one pair after the other, in Python's own numbers."""
    out = x.double().clone()
    for b, h, row, i in itertools.product(*(range(n) for n in x.shape[:3]), range(rotary_dim // 2)):
        first, second = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + rotary_dim // 2)
        turn = cmath.exp(1j * positions[b, row].item() * base ** (-2 * i / rotary_dim))
        z = complex(x[b, h, row, first], x[b, h, row, second]) * turn
        out[b, h, row, first], out[b, h, row, second] = z.real, z.imag
    return out


def assert_rounded(ours: Tensor, exact: Tensor, size: float) -> None:
    """As right as the type can say: half a step of the result, and a little of float32's steps from before."""
    inner = torch.finfo(torch.float64 if ours.dtype == torch.float64 else torch.float32).eps
    allowed = torch.finfo(ours.dtype).eps / 2 * exact.abs() * 1.01 + 2 * inner * size
    assert ((ours.double() - exact).abs() <= allowed).all()


WIDTHS = [(8, 8), (20, 10), (66, 66), (33, 32), (5, 0), (130, 2)]


def check_against_a_loop(layout: str, dtype: torch.dtype, width: int, rotary_dim: int, device: str = "cpu") -> None:
    x = torch.randn(2, 3, 5, width).to(dtype)
    positions = torch.randint(-50, 3000, (2, 5))
    out = rope(x.to(device), positions=positions.to(device), layout=layout, rotary_dim=rotary_dim).cpu()
    assert out.dtype == dtype
    assert_rounded(out, by_loop(x, positions, layout, rotary_dim), x.abs().max().item())
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("width", "rotary_dim"), WIDTHS)
def test_equals_a_loop(layout, dtype, width, rotary_dim):
    check_against_a_loop(layout, dtype, width, rotary_dim)


PLACES = [1, 257, 1857, 4099, 32768, 2**20 - 1, 2**20, -(2**20)]


def check_angles(dtype: torch.dtype, place: int, device: str = "cpu") -> None:
    """The cosines and sines of 64 frequencies, against 50 digits."""
    x = torch.zeros(1, 1, 1, 128, dtype=dtype)
    x[..., :64] = 1
    out = rope(x.to(device), offset=place)[0, 0, 0].cpu()
    with mpmath.workdps(50):
        angles = [place * mpmath.mpf(10000) ** (-mpmath.mpf(i) / 64) for i in range(64)]
        exact = torch.tensor([float(f(t)) for f in (mpmath.cos, mpmath.sin) for t in angles], dtype=torch.float64)
    # An angle is one product of two float64 numbers: so near can it be.
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + 1e-7).all()
    if dtype == torch.float64:
        assert ((out - exact).abs() <= abs(place) * 2.0**-51 + 2e-16).all()
        assert (out[::64] - exact[::64]).abs().max() <= 2e-16  # the first pair's angle is the position itself


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_angles_are_exact(dtype, place):
    check_angles(dtype, place)


FAR_PLACES = [2**21, 2**31 + 1, 2**40 + 12345, 2**53 - 9]


def check_far_angles(place: int, device: str = "cpu", least: float = 2e-16) -> None:
    x = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    exact = [place * 10000.0 ** (-2 * i / 6) for i in range(3)]
    wanted = [math.cos(t) for t in exact] + [math.sin(t) for t in exact]
    error = (rope(x.to(device), offset=place)[0].cpu() - torch.tensor(wanted, dtype=torch.float64)).abs()
    assert error.max() <= place * 2.0**-51
    assert error[::3].max() <= least  # the first pair's angle is the position itself


@pytest.mark.every_isa
@pytest.mark.parametrize("place", FAR_PLACES)
def test_angles_beyond_the_fast_range(place):
    check_far_angles(place)


def test_layouts_are_a_permutation_of_each_other():
    x, order = torch.randn(1, 1, 4, 8), [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(rope(x[..., order]), rope(x, layout="interleaved")[..., order], rtol=0, atol=0)
    one = torch.zeros(1, 8)
    one[0, 0] = 1
    assert rope(one, offset=1)[0].nonzero().flatten().tolist() == [0, 4]
    assert rope(one, offset=1, layout="interleaved")[0].nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_differences_alone(layout):
    query, key = torch.randn(2, 2, 4, 9, 32).unbind(0)
    near = rope(query, layout=layout) @ rope(key, layout=layout).mT
    far = rope(query, offset=1000, layout=layout) @ rope(key, offset=1000, layout=layout).mT
    assert (near - far).abs().max() < 1e-4


def test_offsets_positions_and_caches_agree():
    x = torch.randn(3, 2, 6, 16)
    whole = rope(x)
    assert torch.equal(torch.cat((rope(x[:, :, :5]), rope(x[:, :, 5:], offset=5)), 2), whole)
    assert torch.equal(rope(x, positions=torch.arange(6)), whole)
    assert torch.equal(rope(x, positions=torch.arange(6, dtype=torch.float32)), whole)
    assert torch.equal(rope(x, positions=torch.arange(6, dtype=torch.int32), offset=-2), rope(x, offset=-2))
    for offset in (0, 5, 0):  # nothing is remembered
        assert torch.equal(rope(x, offset=offset), rope(x, positions=torch.arange(offset, offset + 6)))
    offsets = torch.tensor([0, 7, 100])
    each = torch.stack([rope(x[b], offset=offsets[b].item()) for b in range(3)])
    assert torch.equal(rope(x, offset=offsets), each)
    assert torch.equal(rope(x, offset=offsets, positions=torch.arange(6).expand(3, 6)), each)
    assert torch.equal(rope(x, offset=offsets[1]), rope(x, offset=7))


def test_left_padding():
    """A short sample padded on the left equals the sample alone."""
    x, lengths = torch.randn(2, 2, 6, 8), torch.tensor([6, 4])
    out = rope(x, positions=position.left_padded(lengths, 6))
    assert torch.equal(out[0], rope(x[0]))
    assert torch.equal(out[1, :, 2:], rope(x[1, :, 2:]))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 4, 3, 5, 8), (2, 2, 2, 3, 5, 8)], ids=str)
def test_any_number_of_dimensions(shape):
    x = torch.randn(shape)
    flat = x.reshape(-1, 1, 5, 8)
    assert torch.equal(rope(x), rope(flat).reshape(shape))
    if len(shape) > 3:
        positions = torch.randint(0, 99, (*shape[:-3], 5))
        wanted = rope(flat, positions=positions.unsqueeze(-2).expand(*shape[:-3], 3, 5).reshape(-1, 5))
        assert torch.equal(rope(x, positions=positions), wanted.reshape(shape))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 4), (3, 0)], ids=str)
def test_empty(shape):
    x = torch.randn(shape, requires_grad=True)
    out = rope(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape


rows = st.builds(
    dict,
    shape=st.tuples(*(st.integers(1, n) for n in (3, 4, 40)), st.integers(1, 40)),
    strides=st.sampled_from(cases.AXES["strides"]),
    dtype=st.sampled_from(TYPES),
    layout=st.sampled_from(LAYOUTS),
    part=st.floats(0, 1),
    positions=st.sampled_from(("none", "shared", "each", "between")),
    seed=st.integers(0, 2**31),
)


def check_rows(case: dict, device: str = "cpu") -> None:
    torch.manual_seed(case["seed"])
    batch, _, length, width = case["shape"]
    x = cases.strided(case["shape"], case["dtype"], case["strides"])
    rotary_dim = 2 * int(case["part"] * (width // 2))
    positions = {
        "none": None,
        "shared": torch.randint(-100, 5000, (length,)),
        "each": torch.randint(-100, 5000, (batch, length)),
        "between": torch.rand(batch, length) * 100,
    }[case["positions"]]
    places = None if positions is None else positions.to(device)
    out = rope(cases.moved(x, device), positions=places, layout=case["layout"], rotary_dim=rotary_dim)
    exact = reference.rope(x.double(), rotary.frequencies(rotary_dim), positions=positions, layout=case["layout"])
    assert_rounded(out.cpu(), exact, x.double().abs().max().item() * (1 + 1e-5))


@given(case=rows)
def test_random_shapes_strides_and_positions(case):
    check_rows(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_does_not_turn_keeps_its_bits(dtype):
    """Position 0 turns by nothing; every number of a half type comes back, NaN and infinities where they were."""
    if dtype == torch.float32:
        x = torch.randn(1 << 16)
    else:
        x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        x = x[x.isfinite() & ((x == 0) | (x.float().abs() >= torch.finfo(torch.float32).tiny))]
    x = x[: len(x) // 16 * 16].reshape(1, -1, 1, 16)
    assert torch.equal(rope(x), x)
    special = torch.tensor([[math.nan, 1.0, math.inf, -math.inf, 3.0, 2.0]]).to(dtype)
    assert torch.equal(rope(special, rotary_dim=0).isnan(), special.isnan())
    turned = rope(special, rotary_dim=2, layout="interleaved")
    assert turned[0, :2].isnan().all()
    assert torch.equal(turned[0, 2:], special[0, 2:])


@pytest.mark.every_isa
def test_float16_rounds_as_torch_does():
    """Ties, subnormal numbers and overflow, by a factor: rows at position 0 are multiplied by it."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    x = torch.where(x.isfinite(), x, 0).reshape(-1, 1, 16)
    for factor in (0.3, 1.7, 2.0**-11, 3 * 2.0**-12, 40.0):
        out = rope(x, frequencies=rotary.frequencies(16)._replace(factor=factor))
        wanted = (x.float() * torch.tensor(factor)).half()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_for_any_number_of_threads(threads):
    x, before = torch.randn(3, 8, 300, 64), torch.get_num_threads()
    positions = torch.randint(0, 9999, (3, 300))
    try:
        torch.set_num_threads(threads)
        out = rope(x, positions=positions)
    finally:
        torch.set_num_threads(before)
    places = [(b, slice(n, n + 1)) for b in range(3) for n in range(300)]
    one_by_one = [rope(x[b, :, n], positions=positions[b, n]) for b, n in places]
    assert torch.equal(out, torch.cat(one_by_one, 1).unflatten(1, (3, 300)).movedim(1, 0))


X = torch.randn(2, 3, 5, 8)
VALUE_ERRORS = {
    "rank": ((torch.randn(8),), {}, r"x with 2 or more dimensions \[..., H, L, D\], got 1"),
    "layout": ((X,), {"layout": "both"}, "layout half or interleaved, got 'both'"),
    "odd": ((X,), {"rotary_dim": 3}, "rotary_dim even and 0 or more, got 3"),
    "odd_width": ((X[..., :7],), {}, "rotary_dim even and 0 or more, got 7"),
    "negative": ((X,), {"rotary_dim": -2}, "rotary_dim even and 0 or more, got -2"),
    "wide": ((X,), {"rotary_dim": 10}, "x width of 10 or more for the 5 pairs of inv_freq, got 8"),
    "base": ((X,), {"base": 0.0}, "base finite and above 0, got 0.0"),
    "length": ((X,), {"positions": torch.arange(6)}, "positions length 5 as in x, got 6"),
    "batch": ((X,), {"positions": torch.zeros(3, 5).long()}, "positions size 2 or 1 at dimension 0 as in x, got 3"),
    "many": ((X,), {"positions": torch.zeros(2, 3, 5).long()}, r"positions with 1 to 2 dimensions, \[L\] .*, got 3"),
    "no_batch": ((X[0],), {"positions": torch.zeros(1, 5).long()}, "positions with 1 to 1 dimensions, .*, got 2"),
    "axes": ((X,), {"frequencies": rotary.axial(8)}, r"positions \[axes, L\] with axes, got None"),
    "axis": (
        (X,),
        {"frequencies": rotary.axial(8), "positions": torch.zeros(1, 5)},
        "positions with 2 or more axes as in axes, got 1",
    ),
    "axes_length": (
        (X,),
        {"frequencies": rotary.frequencies(8)._replace(axes=(0, 0)), "positions": torch.zeros(1, 5)},
        "axes length 4 as in inv_freq, got 2",
    ),
    "axes_negative": (
        (X,),
        {"frequencies": rotary.frequencies(4)._replace(axes=(0, -1)), "positions": torch.zeros(1, 5)},
        "axes of 0 or more, got -1",
    ),
    "factor": ((X,), {"frequencies": rotary.frequencies(8)._replace(factor=math.nan)}, "factor finite, got nan"),
    "both": ((X,), {"frequencies": rotary.frequencies(8), "rotary_dim": 8}, "no base, rotary_dim or scaling .* both"),
    "inverse_rank": (
        (X,),
        {"frequencies": rotary.Frequencies(torch.ones(2, 2).double())},
        "inv_freq with 1 .*, got 2",
    ),
    "offset_rank": ((X,), {"offset": torch.zeros(2, 5).long()}, r"offset with 0 or 1 dimensions \[B\], got 2"),
    "offset_batch": (
        (X,),
        {"offset": torch.zeros(3).long(), "positions": torch.zeros(2, 5)},
        "offset length 2 as in positions, got 3",
    ),
}
TYPE_ERRORS = {
    "x": ((3,), {}, "x a Tensor, got int"),
    "integers": ((X.long(),), {}, "x dtype float64, .*, got int64"),
    "positions": ((X,), {"positions": [1, 2]}, "positions a Tensor, got list"),
    "rounded": ((X,), {"positions": torch.zeros(5).bfloat16()}, "positions dtype of integers, .*, got bfloat16"),
    "flags": ((X,), {"positions": torch.zeros(5).bool()}, "positions dtype of integers, .*, got bool"),
    "inverse": ((X,), {"frequencies": rotary.Frequencies(torch.ones(4))}, "inv_freq dtype float64, got float32"),
    "offset": ((X,), {"offset": torch.zeros(2)}, "offset an integer or a tensor of integers, got torch.float32"),
    "offset_number": ((X,), {"offset": 1.5}, "offset an integer or a tensor of integers, got float"),
    "scaling": ((X,), {"scaling": "yarn"}, "scaling a rotary.Scaling, got str"),
    "frequencies": ((X,), {"frequencies": torch.ones(4)}, "frequencies a rotary.Frequencies, got Tensor"),
}


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_value_errors(name):
    args, options, wanted = VALUE_ERRORS[name]
    refuses(ValueError, wanted, rope, *args, **options)


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_type_errors(name):
    args, options, wanted = TYPE_ERRORS[name]
    refuses(TypeError, wanted, rope, *args, **options)
