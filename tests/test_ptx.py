"""The PTX that nvcc makes of the kernels, executed on the processor: values, gradients, and what the model finds."""

import pathlib
import re

import cases
import nvcc
import ptx
import pytest
import test_attention
import test_attention_weights
import test_cuda
import test_cuda_derivatives
import test_cuda_weights_derivatives
import test_decode
import test_rope
import torch
from backends import model, on_model

import attention_ops
from attention_ops import reference

pytestmark = pytest.mark.skipif(nvcc.missing() is not None, reason=str(nvcc.missing()))
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def modules() -> list[pathlib.Path]:
    return [nvcc.ptx(name) for name in nvcc.FILES]


@pytest.fixture
def loaded(modules):
    ptx.load(modules)


def check(*sizes: int, **more: object) -> None:
    with on_model(ptx=True):
        test_attention.check(cases.Case(cases.Shape(*sizes), **more))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("lengths", [(64, 64), (70, 75), (130, 40)], ids=str)
def test_tensor_cores(lengths, mask, dtype):
    """Forward, dk dv and dq; whole tiles, ragged ones, and lengths that differ."""
    check(1, 2, 1, *lengths, 64, 64, dtype=dtype, mask=mask)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("mask", ["dense", "ranges", "padding", "block_sparse"])
def test_tensors_of_a_mask_are_read_within_their_bounds(mask):
    check(2, 1, 1, 70, 75, 16, 16, dtype=torch.bfloat16, mask=mask)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("width", [72, 136])
def test_wide_rows_on_tensor_cores(width):
    check(1, 1, 1, 70, 40, width, width, dtype=torch.bfloat16, mask="causal")


@pytest.mark.usefixtures("loaded")
def test_every_extra_on_tensor_cores():
    check(
        1,
        1,
        1,
        40,
        70,
        16,
        16,
        dtype=torch.bfloat16,
        mask="window",
        bias="bias",
        sinks=True,
        softcap=2.5,
        dropout_p=0.2,
    )


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_arithmetic(dtype):
    check(1, 2, 1, 70, 67, 8, 5, dtype=dtype, mask="causal", bias="bias_keys", sinks=True)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding(dtype):
    with on_model(ptx=True):
        test_decode.check(cases.Case(cases.Shape(1, 4, 1, 1, 300, 64, 64), dtype=dtype), "cpu")


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("distance", ["distance_bias_inf", "relative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_terms_by_distance(dtype, distance):
    check(1, 2, 1, 65, 70, 8, 12, dtype=dtype, mask="causal", distance=distance)


DERIVATIVES = (
    {"mask": "causal", "bias": "bias_keys", "sinks": True},
    {"mask": "padding", "softcap": 2.5, "dropout_p": 0.3, "strides": "transposed"},
    {"mask": "window", "distance": "relative", "dtype": torch.bfloat16},
    {"mask": "block_sparse", "distance": "distance_bias_inf", "dtype": torch.float64},
)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("options", DERIVATIVES, ids=lambda options: "-".join(options))
def test_forward_mode_and_second_derivatives(options):
    with on_model(ptx=True):
        test_cuda_derivatives.check(cases.Case(cases.Shape(2, 2, 1, 17, 20, 4, 3), **options), "cpu")


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "dense"])
def test_weights_and_summaries(mask, dtype):
    case = cases.Case(cases.Shape(1, 2, 1, 70, 67, 8, 1), mask=mask, bias="bias_keys", sinks=True, dtype=dtype)
    with on_model(ptx=True):
        test_attention_weights.check_weights(case, "cpu")
        test_attention_weights.check_selection(case, test_attention_weights.selections(case)[3], "cpu")
        if dtype == torch.bfloat16:
            test_attention_weights.check_half_summaries(mask, dtype, "cpu")
        else:
            test_attention_weights.check_summaries(case, "cpu")


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("options", DERIVATIVES[:3], ids=lambda options: "-".join(options))
def test_derivatives_of_weights_and_summaries(options):
    case = cases.Case(cases.Shape(1, 2, 1, 9, 17, 4, 1), **{**options, "dropout_p": 0.0})
    with on_model(ptx=True):
        test_cuda_weights_derivatives.check_weights(case, "cpu")
        test_cuda_weights_derivatives.check_summaries(case, "cpu")


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("layout", test_rope.LAYOUTS)
@pytest.mark.parametrize("dtype", test_rope.TYPES, ids=str)
def test_rope_of_any_positions(dtype, layout):
    case = {"shape": (2, 3, 17, 34), "strides": "transposed", "dtype": dtype, "layout": layout, "part": 0.8, "seed": 1}
    with on_model(ptx=True):
        for positions in ("none", "shared", "each", "between"):
            test_rope.check_rows({**case, "positions": positions})


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("place", [*test_rope.PLACES, *test_rope.FAR_PLACES])
def test_angles_of_rope(place):
    """Near ones by a table of sines of our own, far ones by the functions of CUDA's library."""
    with on_model(ptx=True):
        if place in test_rope.FAR_PLACES:
            test_rope.check_far_angles(place, least=3e-16)
        else:
            test_rope.check_angles(torch.float64, place)


@pytest.mark.usefixtures("loaded")
def test_any_schedule_gives_the_same_bits():
    query, key, value = (torch.randn(1, 1, 130, 16).to(torch.bfloat16) for _ in range(3))
    outs = []
    for schedule in ((0, 0, 1, True), (1, 1, 1, True), (2, 2, 7, True), (2, 2, 8, False)):
        with on_model(*schedule, ptx=True):
            outs.append(attention_ops.attention(query, key, value, mask="causal"))
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_rows_of_a_tile_lie_at_multiples_of_their_bytes(modules):
    """Their addresses are found by flipping bits within them; a row has 512 bytes at most."""
    for name, module in zip(nvcc.FILES, modules, strict=True):
        found = re.findall(r"^\.extern \.shared \.align (\d+)", module.read_text(), re.M)
        assert [int(n) % 512 for n in found] == ([] if name == "simt_rope" else [0])  # which needs none


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["out", "query", "key", "value"])
def test_as_few_sectors_as_the_bytes_take_and_no_bank_conflicts(wanted, dtype):
    leaves = {name: torch.randn(1, 1, 70, 64, dtype=dtype) for name in ("query", "key", "value")}
    if wanted != "out":
        leaves[wanted].requires_grad_()
    with on_model(ptx=True):
        model().take_counters()
        out = attention_ops.attention(**leaves)
        if wanted != "out":
            out.sum().backward()
        counters = model().take_counters()
    assert counters["sectors"] == counters["fewest_sectors"] > 0
    assert counters["passes"] == counters["fewest_passes"]
    assert counters["barriers"] > 0
    assert (counters["multiplications"] > 0) == (dtype == torch.bfloat16)


# Faults in the text of the forward kernel: what is replaced, by what, and what the model then says; None where it is
# silent, and the numbers are wrong.
FAULTS = {
    "no barrier": (r"bar\.sync \t0;", "", "race-"),
    "no wait for copies": (r"cp\.async\.wait_group 0;", "", "copy-not-waited"),
    "no barrier of the warp": (r"bar\.warp\.sync \t-1;", "", "race-"),
    "rows past the end": (r"(cp\.async\.cg.*\[%rd\d+)\]", r"\1+1048576]", "global-out-of-bounds"),
    "copies without their bytes": (r"cp\.async\.cg.*;", "", "shared-never-written"),
    "shared memory past its end": (r"(st\.shared\.b32 \[%r\d+)\]", r"\1+65536]", "shared-out-of-bounds"),
    "half a word too far": (r"(st\.shared\.b32 \[%r\d+)\]", r"\1+2]", "misaligned"),
    "results past the end": (
        r"st\.global\.v4\.b32 \[(%rd\d+)\]",
        r"st.global.v4.b32 [\1+1048576]",
        "global-out-of-bounds",
    ),
    "results that nobody writes": (r"st\.global\.v4\.b32 .*;", "", "never-written"),
    "a register that nobody writes": (r"mov\.u32 \t%r1, %tid\.x;", "", "register-never-written"),
    "matrices not transposed": (r"x4\.trans", "x4", None),
    "rows of the left operand swapped": (
        r"(mma.*?\}, \{)(%r\d+),(%r\d+),(%r\d+),(%r\d+)",
        r"\1\3,\2,\4,\5",
        None,
    ),
    "halves of the right operand swapped": (r"(mma.*?\}.*?\}, \{)(%r\d+),(%r\d+)\}", r"\1\3,\2}", None),
    "products that are not added up": (r"(mma.*, )\{.*\};", r"\1{0f00000000,0f00000000,0f00000000,0f00000000};", None),
}


def forward() -> None:
    """One call of the forward kernel, against the formula."""
    query, key, value = (torch.randn(1, 1, n, 64).to(torch.bfloat16) for n in (70, 75, 75))
    with on_model(ptx=True):
        out = attention_ops.attention(query, key, value, mask="causal")
    exact = reference.attention(query.double(), key.double(), value.double(), mask="causal")
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.02)


def load_faulty(modules: list[pathlib.Path], folder: pathlib.Path, old: str, new: str) -> None:
    """The modules, with a fault in that one kernel."""
    place = nvcc.FILES.index("tensor_forward")
    text, path = modules[place].read_text(), folder / "faulty.ptx"
    kernel = re.compile(r"\.visible \.entry \S*8BFloat16ENS_12ForwardShapeILi64ELb0E.*?\n}\n", re.S)
    path.write_text(kernel.sub(lambda found: re.sub(old, new, found[0]), text))
    assert path.read_text() != text
    ptx.load([*modules[:place], path, *modules[place + 1 :]])


@pytest.mark.usefixtures("loaded")
def test_the_forward_kernel_as_it_is():
    forward()


def test_sectors_that_are_touched_in_pieces_are_counted(modules, tmp_path):
    """Each lane stores one word of four: a quarter of every sector."""
    load_faulty(modules, tmp_path, r"st\.global\.v4\.b32 (\[%rd\d+\]), \{(%r\d+),.*\};", r"st.global.b32 \1, \2;")
    model().take_counters()
    with pytest.raises(AssertionError):
        forward()
    counters = model().take_counters()
    assert counters["sectors"] > counters["fewest_sectors"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_text_is_found(name, modules, tmp_path):
    old, new, found = FAULTS[name]
    load_faulty(modules, tmp_path, old, new)
    with pytest.raises(AssertionError, match=found and f"^{found}"):
        forward()


def test_what_the_interpreter_does_not_know_stops_it(modules, tmp_path):
    load_faulty(modules, tmp_path, r"ldmatrix\.sync", "ldmatrix.later")
    with pytest.raises(RuntimeError, match=r"unknown instruction: ldmatrix\.later"):
        forward()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("many", [1, 3])
def test_huge_scores(many, dtype):
    with on_model(ptx=True):
        test_cuda.check_huge_scores(many, dtype, "cpu")
