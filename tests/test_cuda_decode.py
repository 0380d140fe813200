"""Few query rows over many keys on CUDA: on the model that runs the kernels without a GPU, and on a GPU."""

import itertools

import cases
import pytest
import test_decode
import torch
from backends import HAS_GPU, model, on_model
from test_decode import MASKS, TYPES, check_hidden, shape_of

import attention_ops
from attention_ops import masks, reference

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
KEYS = [1, 17, 63, 64, 65, 100, 255, 256, 257, 513]


def check(device: str, group: int, queries: int, keys: int, *sizes: int, **more: object) -> None:
    """One key head on the model, where a thread costs much."""
    shape = cases.Shape(1, group, 1, queries, keys, *(sizes or (8, 12)))
    test_decode.check(cases.Case(shape, **more), device)


@pytest.mark.parametrize("rows", test_decode.ROWS, ids=str)
def test_every_number_of_rows(rows, device):
    for dtype, keys in zip(itertools.cycle(TYPES), (1, 70), strict=False):
        check(device, *rows, keys, dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("keys", KEYS)
def test_edges_of_chunks(keys, dtype, device):
    check(device, 1, 1, keys, dtype=dtype)
    check(device, 2, 2, keys, mask="causal", sinks=True, dtype=dtype)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, device):
    for dtype, (group, queries) in zip(TYPES, ((1, 1), (4, 1), (2, 3), (1, 16)), strict=True):
        check(device, group, queries, 300 if queries == 1 else 100, mask=mask, dtype=dtype)


@pytest.mark.parametrize("mask", ["no_mask", "padding"])
@pytest.mark.parametrize("bias", cases.BIASES)
def test_every_bias(bias, mask, device):
    for dtype, (group, queries) in zip(TYPES, ((1, 1), (4, 1), (2, 3), (1, 16)), strict=True):
        check(device, group, queries, 100, mask=mask, bias=bias, dtype=dtype)


@pytest.mark.parametrize(
    "options", list(itertools.product((False, True), (None, 2.5), (None, -0.7), (0.0, 0.3))), ids=str
)
def test_every_option(options, device):
    sinks, softcap, scale, dropout_p = options
    for bias, mask in (("no_bias", "no_mask"), ("bias_inf", "padding")):
        more = {"bias": bias, "sinks": sinks, "softcap": softcap, "scale": scale, "dropout_p": dropout_p}
        check(device, 2, 2, 300, mask=mask, **more)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 33, 64, 129, 257, 513])
def test_widths(width, dtype, device):
    check(device, 1, 1, 70, width, 5, dtype=dtype)
    check(device, 1, 2, 70, 5, width, mask="padding", dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("strides", cases.AXES["strides"])
def test_strides(strides, dtype, device):
    test_decode.check(cases.Case(cases.Shape(2, 4, 2, 1, 70, 20, 12), strides=strides, dtype=dtype), device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_hidden_keys_may_hold_anything(poison, dtype, device):
    check_hidden(1, poison, dtype, device)


def test_rows_that_see_nothing(device):
    query, key = torch.randn(2, 2, 1, 8).to(device), torch.randn(2, 1, 300, 8).to(device)
    lengths = torch.tensor([0, 300], device=device)
    out, lse = attention_ops.attention(query, key, key, mask=masks.padding(lengths), return_lse=True)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 20])
def test_a_sink_that_is_no_number_shows(queries, dtype, device):
    query, key = (torch.randn(1, 2, n, 8).to(dtype).to(device) for n in (queries, 70))
    sinks = torch.tensor([0.0, torch.nan], dtype=dtype, device=device)
    out, lse = attention_ops.attention(query, key, key, sinks=sinks, return_lse=True)
    assert out[0, 0].isfinite().all()
    assert lse[0, 0].isfinite().all()
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan().all()


def test_shared_memory_of_the_smallest_blocks():
    """99 KB, as of compute capabilities 8.6, 8.9 and 12.0: the widest rows, as many as there may be."""
    with on_model(shared_kilobytes=99):
        check("cpu", 4, 4, 70, 512, 8, dtype=torch.float64)


@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize("widths", [(0, 4), (4, 0)])
def test_empty(widths, keys, device):
    check(device, 2, 1, keys, *widths, sinks=True)


def test_sums_do_not_drift_over_many_chunks(device):
    query, key = torch.zeros(1, 1, 1, 1, device=device), torch.zeros(1, 1, 2000, 1, device=device)
    value = torch.arange(2000.0, device=device).view(1, 1, -1, 1) / 2000
    out, lse = attention_ops.attention(query, key, value, return_lse=True)
    torch.testing.assert_close(out.item(), value.double().mean().item(), rtol=3e-7, atol=0)
    torch.testing.assert_close(lse.item(), torch.tensor(2000.0).log().item(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("schedule", [(1, 1, 1, True), (2, 2, 7, True)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_schedule_gives_the_same_bits(schedule, dtype):
    """Threads and blocks in any order."""
    inputs = cases.make(cases.Case(shape_of(2, 2, 300), "causal&padding", "bias_keys", dropout_p=0.1, dtype=dtype))
    results = []
    for chosen in ((0, 0, 1, True), schedule):
        with on_model(*chosen):
            results.append(attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_rows_of_a_key_head_share_its_loads():
    key, loads = torch.randn(1, 1, 256, 64), []
    for heads in (1, 8):
        with on_model():
            model().take_counters()
            attention_ops.attention(torch.randn(1, heads, 1, 64), key, key)
            loads.append(model().take_counters()["loads"])
    assert 2 * key.numel() < loads[0] < loads[1] < 1.25 * loads[0]


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_long_cache_of_many_heads(dtype):
    query, key = (torch.randn(2, h, n, 64, device="cuda").to(dtype) for h, n in ((16, 1), (4, 20000)))
    found = attention_ops.attention(query, key, key, mask="sliding_window(15000, 0)")
    wanted = reference.attention(query.double(), key.double(), key.double(), mask="sliding_window(15000, 0)")
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2 * torch.finfo(dtype).eps)


@needs_gpu
@pytest.mark.parametrize("size", [(70000, 1, 1, 4), (1, 70000, 1, 4)], ids=str)
def test_many_batches_and_heads(size):
    query, key, value = (torch.randn(size, device="cuda") for _ in range(3))
    torch.testing.assert_close(attention_ops.attention(query, key, value), value)
