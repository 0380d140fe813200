"""Rows whose scores are all one huge number: every pass must find the sum that lse cannot hold beside it."""

import pytest
import torch
from compare import OUTPUT, assert_close

import attention_ops
from attention_ops import reference

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fill", [-1e4, -1e9, -1e30, "lowest", "highest"])
@pytest.mark.parametrize("sink", [False, True])
def test_a_row_of_one_huge_number_weighs_its_keys_alike(fill, sink, dtype):
    """In the weights, the summaries and every gradient too, although lse cannot hold log n beside such a number."""
    n, info = 70, torch.finfo(dtype)
    fill = {"lowest": info.min, "highest": info.max}.get(fill, fill)
    if not info.min <= fill <= info.max:
        fill = info.min
    query, key = torch.zeros(1, 1, 5, 8, dtype=dtype), torch.randn(1, 1, n, 8).to(dtype)
    value = torch.randn(1, 1, n, 6).to(dtype).requires_grad_()
    bias = torch.full((1, 1, 5, n), fill, dtype=dtype)
    sinks = torch.full((1,), fill, dtype=dtype) if sink else None
    share = torch.tensor(1 / (n + sink), dtype=dtype)
    out = attention_ops.attention(query, key, value, bias=bias, sinks=sinks)
    out.sum().backward()
    near = {"atol": 2 * info.eps, "rtol": 4 * info.eps}
    torch.testing.assert_close(value.grad, (5 * share).expand_as(value), **near)
    for given in (query, query.clone().requires_grad_()):
        weights = attention_ops.attention_weights(given, key, bias=bias, sinks=sinks)
        torch.testing.assert_close(weights, share.expand_as(weights), **near)
    summaries = attention_ops.attention_summaries(query, key, bias=bias, sinks=sinks)
    torch.testing.assert_close(summaries.maximum[0, 0].to(dtype), share.expand(5), **near)


def test_sums_do_not_drift_over_many_blocks():
    """4096 equal keys: a factor that is 1 but for rounding, once a block, would show."""
    query, key = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 4096, 8)
    value = torch.arange(4096.0).view(1, 1, -1, 1) / 4096  # early keys must not outweigh late ones
    out, lse = attention_ops.attention(query, key, value, return_lse=True)
    torch.testing.assert_close(out.item(), value.double().mean().item(), rtol=3e-7, atol=0)
    torch.testing.assert_close(lse.item(), torch.tensor(4096.0).log().item(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropy_has_a_gradient_beside_the_lowest_number(dtype):
    query, key = (torch.randn(1, 1, n, 4, dtype=dtype, requires_grad=True) for n in (3, 2))
    bias = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype, requires_grad=True)
    entropy = attention_ops.attention_summaries(query, key, bias=bias).entropy
    for grad in torch.autograd.grad(entropy, (query, key, bias), torch.full_like(entropy, 7.0)):
        torch.testing.assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("far", [30.0, -300.0])
@pytest.mark.parametrize("width", [8, 64, 256])
def test_a_far_bias_rounds_a_score_once(width, far):
    """Not every term of its product: as the bias is turned to log2 units, added, and compared with the largest."""
    query, key, value = (torch.randn(1, 2, 60, width) for _ in range(3))
    bias = far + torch.randn(1, 2, 60, 60)
    exact = reference.attention(query.double(), key.double(), value.double(), bias=bias.double())
    plain = reference.attention(query, key, value, bias=bias)
    assert_close(attention_ops.attention(query, key, value, bias=bias), plain, exact, 2 * OUTPUT)
