"""Few query rows over many keys: every mask and option against float64, edges of chunks, threads, what is not read."""

import itertools
import re
import subprocess

import cases
import pytest
import torch
from compare import OUTPUT, assert_close
from processes import ROOT, run_alone
from torch import Tensor

import attention_ops
from attention_ops import masks, reference

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KEYS = [1, 2, 63, 64, 65, 511, 512, 513, 1025, 5000, 8193]
ROWS = [(group, queries) for group in range(1, 9) for queries in (1, 2, 3, 5, 8, 16) if group * queries <= 16]
MASKS = [*cases.KINDS, "causal&padding", "window|dilated&causal", "nothing"]


def check(case: cases.Case, device: str = "cpu") -> None:
    inputs = cases.make(case)
    moved = inputs.on(device)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        ours = [x.cpu() for x in attention_ops.attention(**moved.tensors, **moved.options, return_lse=True)]
        exact, plain, plain_lse = (
            reference.attention(**inputs.to(dtype).tensors, **inputs.options, return_lse=True)
            for dtype in (torch.float64, case.dtype, lse_dtype)
        )
    assert_close(ours[0], plain[0], exact[0], OUTPUT, "out")
    assert_close(ours[1], plain_lse[1], exact[1], OUTPUT, "lse")


def shape_of(group: int, queries: int, keys: int, width: int = 16, value_width: int = 24) -> cases.Shape:
    return cases.Shape(2, 2 * group, 2, queries, keys, width, value_width)


@pytest.mark.every_isa
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_every_number_of_rows(rows):
    for dtype, keys in zip(itertools.cycle(TYPES), (1, 70, 513), strict=False):
        check(cases.Case(shape_of(*rows, keys), dtype=dtype))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("keys", KEYS)
def test_edges_of_chunks(keys, dtype):
    check(cases.Case(shape_of(1, 1, keys), dtype=dtype))
    check(cases.Case(shape_of(3, 2, keys), mask="causal", sinks=True, dtype=dtype))


@pytest.mark.every_isa
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask):
    for dtype, (group, queries) in zip(TYPES, ((1, 1), (4, 1), (2, 3), (1, 16)), strict=True):
        check(cases.Case(shape_of(group, queries, 700), mask=mask, dtype=dtype))


@pytest.mark.parametrize("mask", ["no_mask", "padding", "window", "dense"])
@pytest.mark.parametrize("bias", cases.BIASES)
def test_every_bias(bias, mask):
    for dtype, (group, queries) in zip(TYPES, ((1, 1), (4, 1), (2, 3), (1, 16)), strict=True):
        check(cases.Case(shape_of(group, queries, 600), mask=mask, bias=bias, dtype=dtype))


@pytest.mark.parametrize(
    "options", list(itertools.product((False, True), (None, 2.5), (None, -0.7), (0.0, 0.3))), ids=str
)
def test_every_option(options):
    sinks, softcap, scale, dropout_p = options
    for bias, mask in (("no_bias", "no_mask"), ("bias_inf", "padding")):
        shape = shape_of(2, 2, 600)
        check(cases.Case(shape, mask, bias, sinks=sinks, softcap=softcap, scale=scale, dropout_p=dropout_p))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 16, 20, 33, 64, 80, 129])
def test_widths(width, dtype):
    check(cases.Case(shape_of(1, 1, 130, width, 130 - width), dtype=dtype))
    check(cases.Case(shape_of(5, 1, 130, width, 130 - width), mask="padding", dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("strides", cases.AXES["strides"])
def test_strides(strides, dtype):
    check(cases.Case(shape_of(4, 1, 700, 40, 40), strides=strides, dtype=dtype))


def test_rows_of_whole_pages():
    """A cache whose rows are 4096 bytes apart."""
    key, value = torch.randn(2, 1, 600, 16, 64).transpose(2, 3)
    query = torch.randn(1, 16, 1, 64)
    assert key.stride(2) * key.element_size() == 4096
    exact = reference.attention(query.double(), key.double(), value.double())
    plain = reference.attention(query, key, value)
    assert_close(attention_ops.attention(query, key, value), plain, exact, OUTPUT)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (8, 2)], ids=str)
def test_the_same_as_with_many_rows(rows, dtype):
    """Repeated until they are too many for decoding, the rows come out alike."""
    inputs = cases.make(cases.Case(shape_of(*rows, 700), mask="padding", bias="bias_keys", sinks=True, dtype=dtype))
    few = attention_ops.attention(**inputs.tensors, **inputs.options)
    inputs.tensors["query"] = inputs.tensors["query"].repeat(1, 1, 20, 1)
    many = attention_ops.attention(**inputs.tensors, **inputs.options)[:, :, : few.size(2)]
    weights_step = 2**-8 if dtype == torch.bfloat16 else 0  # many rows may multiply values with weights of that type
    atol = 2e-6 + weights_step * inputs.tensors["value"].detach().abs().float().mean().item()
    torch.testing.assert_close(few, many, rtol=2 * torch.finfo(dtype).eps, atol=atol)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("group", [1, 4])
def test_hidden_keys_may_hold_anything(group, poison, dtype):
    check_hidden(group, poison, dtype)


def check_hidden(group: int, poison: float, dtype: torch.dtype, device: str = "cpu") -> None:
    """An unfilled cache, also where one row of a key head sees a key and another does not."""
    shape = shape_of(group, 2, 700)
    inputs = cases.make(cases.Case(shape, dtype=dtype)).on(device)
    mask = masks.ranges(torch.tensor([3, 5], device=device), torch.tensor([530, 540], device=device))
    inputs.options["mask"] = mask
    visible = mask.dense(2, 2 * group, 2, 700)
    clean = attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True)
    with torch.no_grad():
        for name in ("key", "value"):
            inputs.tensors[name][:, :, :3] = poison
            inputs.tensors[name][:, :, 540:] = poison
    dirty = attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    with torch.no_grad():
        inputs.tensors["value"][:, :, 535] = poison
    half = attention_ops.attention(**inputs.tensors, **inputs.options)
    assert not visible[0, 0, 0, 535]
    assert torch.equal(half[:, :, 0], clean[0][:, :, 0])
    assert not half[:, :, 1].isfinite().any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_hidden_value_in_a_later_tile_may_hold_anything(dtype):
    query, key, value = (torch.randn(1, heads, n, 20).to(dtype) for heads, n in ((4, 1), (2, 200), (2, 200)))
    mask = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    mask[..., 100] = False
    clean = attention_ops.attention(query, key, value, mask=mask)
    value[:, :, 100] = torch.nan
    assert torch.equal(attention_ops.attention(query, key, value, mask=mask), clean)


def test_rows_that_see_nothing():
    query, key = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 600, 8)
    out, lse = attention_ops.attention(query, key, key, mask=masks.padding(torch.tensor([0, 600])), return_lse=True)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_number_is_read_as_it_is(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    query, key = torch.zeros(1, 1, 1, 1, dtype=dtype), torch.zeros(1, 1, 1, 1, dtype=dtype)
    normal = numbers.float().abs() > torch.finfo(torch.float32).tiny  # at and below it, results may be 0
    out = attention_ops.attention(query, key, numbers.view(1, 1, 1, -1)).view(-1)
    assert torch.equal(out[normal], numbers[normal])
    assert ((out == numbers) | (out == 0))[~normal].all()
    numbers = numbers[numbers.isfinite() & (numbers.abs() < 1e30)]
    query = torch.ones(1, len(numbers), 1, 1, dtype=dtype)
    _, lse = attention_ops.attention(query, *[numbers.view(1, -1, 1, 1)] * 2, scale=1.0, return_lse=True)
    torch.testing.assert_close(lse.view(-1), numbers.float(), rtol=3e-7, atol=2e-7)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (8, 2)], ids=str)
def test_bits_do_not_depend_on_threads_or_neighbours(rows, dtype):
    inputs = cases.make(cases.Case(shape_of(*rows, 3000), mask="causal&padding", dropout_p=0.1, dtype=dtype))
    before = torch.get_num_threads()
    results: list[tuple[Tensor, Tensor]] = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_a_window_costs_its_width():
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 10000, 8)
    torch.ops.attention_ops._visited_tiles()
    attention_ops.attention(query, key, key, mask=masks.sliding_window(100, 0))
    assert 0 < torch.ops.attention_ops._visited_tiles() <= 2 * 3
    attention_ops.attention(query, key, key)
    assert torch.ops.attention_ops._visited_tiles() == 2 * -(-10000 // 64)


def test_keys_of_half_types_are_not_copied():
    """A float32 copy of this cache would take 64 MiB."""
    code = """
        import pathlib, torch, attention_ops
        def memory(field):
            status = pathlib.Path("/proc/self/status").read_text()
            return int(status.split(field + ":")[1].split()[0]) / 1024
        key = torch.zeros(1, 4, 65536, 64, dtype=torch.bfloat16)
        query = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
        attention_ops.attention(query, key[:, :, :64], key[:, :, :64])
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        attention_ops.attention(query, key, key)
        print(memory("VmHWM") - before)
    """
    assert float(run_alone(code)) < 16


def test_prefetches_are_compiled():
    """g++ drops the calls of a function that it takes for one without effects, as of one that only prefetches."""
    source = """#include "kernels/cpu/score.h"
    using namespace attention_ops;
    __attribute__((noinline)) void ask(const RowsToAsk& rows, Index row) { rows.ask(row); }
    void ask_all(const RowsToAsk& rows) { for (Index row = 0; row < rows.rows; ++row) ask(rows, row); }"""
    command = ["g++", "-std=c++20", "-O3", "-Wno-psabi", f"-I{ROOT / 'csrc'}", "-S", "-x", "c++", "-", "-o", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    assert re.search(r"\b(?:prefetch|prfm)", done.stdout)
    assert re.search(r"\b(?:call|jmp|bl?)\s+_Z3ask", done.stdout)


@pytest.mark.parametrize(("queries", "error"), [(1, 2e-6), (20, 5e-5)])
def test_sums_do_not_drift_over_many_keys(queries, error):
    """A sum of rounded terms, one key after the other, would be wrong by 2e-3."""
    query = torch.zeros(1, 8, queries, 16)
    key, value = torch.zeros(1, 1, 300_000, 16), torch.full((1, 1, 300_000, 16), 0.1)
    torch.testing.assert_close(
        attention_ops.attention(query, key, value), torch.full_like(query, 0.1), rtol=error, atol=0
    )
