"""Numbers below the normal range: kernels take them for zero, as fast as any other, and nobody else notices."""

import time

import pytest
import torch
from torch import Tensor

import attention_ops

pytestmark = pytest.mark.every_isa
DENORMAL = 1e-40


def made(which: str, length: int, backward: bool = False) -> list[Tensor]:
    shape = (1, 4, length, 64)
    tensors = [torch.full(shape, DENORMAL) if name in which else torch.randn(shape) for name in "qkv"]
    return [x.requires_grad_(backward) for x in tensors]


def call(tensors: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    out = attention_ops.attention(*tensors)
    return (out.detach(), *torch.autograd.grad(out, tensors, grad_out))


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_what_is_lost_is_below_the_normal_range(which):
    tensors = made(which, 40, backward=True)
    grad_out = torch.randn_like(tensors[0])
    zeros = [x.detach().where(x.detach().abs() >= 2**-126, 0).requires_grad_() for x in tensors]
    for ours, expected in zip(call(tensors, grad_out), call(zeros, grad_out), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-37)


def test_arithmetic_outside_keeps_them():
    call(made("v", 300, backward=True), torch.randn(1, 4, 300, 64))
    assert (torch.full((1 << 16,), DENORMAL) * 0.5 != 0).all()  # in every thread


def test_small_half_precision_numbers_are_not_among_them():
    bias = torch.full((1, 1, 1, 3), 2.0**-24, dtype=torch.float16)
    query, key, value = (torch.zeros(1, 1, n, 1, dtype=torch.float16) for n in (1, 3, 3))
    lse = attention_ops.attention(query, key, value, bias=bias, return_lse=True)[1].double()
    unbiased = attention_ops.attention(query, key, value, return_lse=True)[1].double()
    assert 0 <= (lse - unbiased).item() < 2.0**-22


@pytest.fixture
def one_thread():
    """Without others to wait for: threads that wait spin, which counts as their time where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_they_take_no_longer(one_thread: None):
    def best(which: str) -> float:
        tensors, grad_out = made(which, 256, backward=True), torch.full((1, 4, 256, 64), DENORMAL if which else 1.0)
        times = []
        for _ in range(5):
            begin = time.thread_time()
            call(tensors, grad_out)
            times.append(time.thread_time() - begin)
        return min(times)

    assert best("qkv") < 6 * best("")  # it was 80 times as long
