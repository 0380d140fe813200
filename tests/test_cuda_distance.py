"""What depends on the distance, on CUDA: on the model that runs the kernels without a GPU, and on a GPU."""

import itertools

import cases
import pytest
import test_attention
import test_cuda_derivatives
import test_decode
import torch
from backends import HAS_GPU, less_memory_than, on_model
from test_distance import KINDS, small_tables
from torch import Tensor

import attention_ops
from attention_ops import position

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
DISTANCES = [name for name in cases.DISTANCES if name != "no_distance"]
OPTIONS = [
    {},
    {"mask": "causal", "softcap": 2.5, "dropout_p": 0.3, "bias": "bias_inf"},
    {"mask": "padding", "dtype": torch.bfloat16, "strides": "stepped", "sinks": True},
    {"mask": "window", "dtype": torch.float64, "strides": "transposed", "scale": -0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("distance", DISTANCES)
def test_values_and_gradients(distance, options, device):
    """Several samples and heads of a group; several tiles, and shapes whose last tiles are not full."""
    for shape in (cases.Shape(2, 2, 1, 7, 9, 3, 2), cases.Shape(1, 2, 1, 65, 70, 8, 12)):
        test_attention.check(cases.Case(shape, distance=distance, **options), device)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("distance", DISTANCES)
def test_forward_mode_and_second_derivatives(distance, options, device):
    shape = cases.Shape(2, 2, 1, 6, 9, 3, 2)
    test_cuda_derivatives.check(cases.Case(shape, distance=distance, **options), device)


@pytest.mark.parametrize(("queries", "keys"), [(1, 130), (130, 1), (63, 66), (66, 63), (64, 128), (129, 64)])
def test_ranges_of_rows(queries, keys, device):
    """Every row of a table is some task's, whatever the first distance is."""
    shape = cases.Shape(1, 1, 1, queries, keys, 3, 2)
    test_attention.check(cases.Case(shape, mask="window_apart", distance="relative"), device)


@pytest.mark.parametrize("width", [65, 130])
def test_wide_rows(width, device):
    for sizes in ((width, 5), (5, width)):
        shape = cases.Shape(1, 1, 1, 9, 17, *sizes)
        test_attention.check(cases.Case(shape, mask="causal", distance="relative"), device)
        test_cuda_derivatives.check(cases.Case(shape, distance="relative"), device)


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(shape, device):
    for distance in ("distance_bias", "relative"):
        test_attention.check(cases.Case(shape, mask="padding", distance=distance), device)


@pytest.mark.parametrize("bias", ["no_bias", "bias", "bias_float32"])
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 24), (torch.float16, 72), (torch.bfloat16, 136)], ids=str
)
def test_a_bias_by_distance_on_tensor_cores(dtype, width, bias, device):
    for mask, distance in (("no_mask", "distance_bias"), ("causal", "distance_bias_inf")):
        shape = cases.Shape(1, 2, 1, 70, 75, width, 8)
        test_attention.check(cases.Case(shape, mask, bias, distance, dtype=dtype), device)


@pytest.mark.parametrize("distance", ["distance_bias", "distance_bias_inf", "relative"])
@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (2, 3)], ids=str)
def test_decoding(rows, distance, device):
    for dtype, mask in ((torch.float32, "no_mask"), (torch.bfloat16, "padding"), (torch.float64, "causal")):
        case = cases.Case(cases.Shape(1, rows[0], 1, rows[1], 300, 8, 12), mask, distance=distance, dtype=dtype)
        test_decode.check(case, device)


@pytest.mark.parametrize("name", KINDS)
def test_gradcheck_and_gradgradcheck(name, device):
    """Of one table at a time: on the model every call costs much."""
    given, tables = ({n: t[:1].to(device) for n, t in x.items()} for x in (cases.small_inputs(), small_tables()))
    del given["sinks"]
    seed = torch.tensor([3], device=device)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        options = {"mask": "causal", "softcap": 1.5, "dropout_p": 0.25, "seed": seed, "return_lse": True}
        return attention_ops.attention(**{**given, **tables, name: x}, **options)

    leaf, fast = tables[name].requires_grad_(), {"fast_mode": device == "cpu"}
    assert torch.autograd.gradcheck(function, leaf, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(function, leaf, check_fwd_over_rev=True, check_rev_over_rev=True, **fast)


@pytest.mark.parametrize("name", ["attention_weights", "attention_summaries"])
@pytest.mark.parametrize("table", KINDS[:2])
def test_weights_to_the_second_derivative(table, name, device):
    given, tables = (
        {n: t[:1].to(device) for n, t in x.items()} for x in (cases.small_inputs(), small_tables(KINDS[:2]))
    )
    del given["value"], given["sinks"]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        results = getattr(attention_ops, name)(**{**given, **tables, table: x}, mask="causal")
        return (results,) if isinstance(results, Tensor) else tuple(results)

    leaf = tables[table].requires_grad_()
    assert torch.autograd.gradcheck(function, leaf, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaf, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("schedule", [(1, 1, 1, True), (2, 2, 7, False)], ids=str)
@pytest.mark.parametrize(
    ("distance", "dtype"), [("relative", torch.float32), ("distance_bias", torch.bfloat16)], ids=str
)
def test_any_schedule_gives_the_same_bits(distance, dtype, schedule):
    """Threads and blocks in any order, copies late or at once; shares of a sum in theirs."""
    case = cases.Case(cases.Shape(2, 2, 1, 40, 70, 5, 3), "causal", distance=distance, dropout_p=0.1, dtype=dtype)
    inputs, results = cases.make(case), []
    for chosen in ((0, 0, 1, True), schedule):
        with on_model(*chosen):
            out = attention_ops.attention(**inputs.tensors, **inputs.options)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), list(inputs.tensors.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
@pytest.mark.parametrize("distance", DISTANCES)
def test_the_grid_beyond_the_model(distance):
    for (mask, dtype), shape in zip(
        itertools.product(("causal", "padding", "block_sparse"), (torch.float32, torch.bfloat16)),
        itertools.cycle((cases.Shape(2, 4, 2, 300, 500, 64, 64), cases.Shape(1, 2, 1, 513, 257, 80, 129))),
        strict=False,
    ):
        test_attention.check(cases.Case(shape, mask, distance=distance, dtype=dtype), "cuda")


@needs_gpu
def test_memory_is_linear_in_the_length():
    length = 16384
    leaves = [torch.randn(1, 1, length, 16, device="cuda", requires_grad=True) for _ in range(3)]
    tables = [torch.randn(1, 1, 2 * length - 1, *w, device="cuda", requires_grad=True) for w in ((), (16,), (16,))]
    with less_memory_than(128):
        named = dict(zip(KINDS, tables, strict=True))
        attention_ops.attention(*leaves, **named, mask="causal").sum().backward()


@needs_gpu
def test_a_bias_by_distance_equals_the_dense_one():
    query, key, value = (torch.randn(2, 4, n, 64, device="cuda").bfloat16() for n in (500, 700, 700))
    bias = position.alibi(position.alibi_slopes(4).cuda(), 500, 700)
    ours = attention_ops.attention(query, key, value, distance_bias=bias, mask="causal")
    wanted = attention_ops.attention(query, key, value, bias=position.expand(bias, 500, 700), mask="causal")
    torch.testing.assert_close(ours, wanted, rtol=0.02, atol=0.02)
