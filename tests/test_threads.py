"""Threads: the same bits for any number of them, several at once, and a fork after use."""

import concurrent.futures

import cases
import pytest
import torch
from processes import run_alone
from torch import Tensor

import attention_ops


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def everything(inputs: cases.Inputs) -> list[Tensor]:
    out, lse = attention_ops.attention(**inputs.tensors, **inputs.options, return_lse=True)
    leaves = list(inputs.tensors.values())
    torch.manual_seed(1)
    grads = torch.autograd.grad((out, lse), leaves, (torch.randn(out.shape).to(out.dtype), torch.randn_like(lse)))
    tensors = {name: t for name, t in inputs.tensors.items() if name not in cases.OF_VALUES}
    options = {name: o for name, o in inputs.options.items() if name not in ("dropout_p", "seed")}
    weights = attention_ops.attention_weights(**tensors, **options, average=True)
    with torch.no_grad():  # another kernel
        alone = [attention_ops.attention_weights(**tensors, **options, average=average) for average in (False, True)]
    summaries = attention_ops.attention_summaries(**tensors, **options)
    loss = weights.square().sum() + sum(s.square().sum() for s in summaries)
    return [out, lse, *grads, weights, *alone, *summaries, *torch.autograd.grad(loss, list(tensors.values()))]


SHAPES = [
    cases.Shape(1, 1, 1, 700, 700, 16, 16),
    cases.Shape(2, 8, 2, 150, 130, 20, 33),
    cases.Shape(1, 2, 1, 1, 3000, 32, 32),
    cases.Shape(4, 6, 2, 70, 70, 8, 8),
]


@pytest.mark.every_isa
@pytest.mark.parametrize(
    ("mask", "bias", "distance"),
    [
        ("no_mask", "no_bias", "no_distance"),
        ("no_mask", "bias_keys", "no_distance"),
        ("causal", "bias_rows", "distance_bias"),
        ("causal", "bias_plane", "no_distance"),
        ("padding", "bias_number", "distance_bias_inf"),
        ("padding", "no_bias", "no_distance"),
        ("causal", "no_bias", "relative"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_equal_for_any_number_of_threads(shape, mask, bias, distance, threads):
    dtype = torch.bfloat16 if mask == "padding" else torch.float32
    inputs = cases.make(
        cases.Case(shape, mask=mask, bias=bias, distance=distance, sinks=True, dropout_p=0.1, dtype=dtype)
    )
    threads(1)
    wanted = everything(inputs)
    for count in (1, 2, 3, 2):
        threads(count)
        for n, (a, b) in enumerate(zip(everything(inputs), wanted, strict=True)):
            assert torch.equal(a, b), f"result {n} with {count} threads"


def test_several_python_threads_at_once():
    inputs = [cases.make(cases.Case(cases.Shape(2, 4, 2, 90, 80, 16, 16), mask=m)) for m in ("causal", "dense")]
    wanted = [[t.clone() for t in simple(given)] for given in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, results in enumerate(pool.map(lambda n: simple(inputs[n % 2]), range(80))):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted[n % 2], strict=True))


def simple(inputs: cases.Inputs) -> list[Tensor]:
    out = attention_ops.attention(**inputs.tensors, **inputs.options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(inputs.tensors.values()))]


def test_backward_from_several_threads_over_one_graph():
    leaf = torch.randn(1, 4, 100, 16, requires_grad=True)
    out = attention_ops.attention(leaf, leaf, leaf, mask="causal")
    (wanted,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for (grad,) in pool.map(lambda _: torch.autograd.grad(out.sum(), leaf, retain_graph=True), range(20)):
            assert torch.equal(grad, wanted)


COUNT = """
    import os, torch, attention_ops
    torch.set_num_threads(1)
    x = torch.randn(2, 8, 512, 32)
    out, lse = torch.ops.attention_ops._attention_forward(x, x, x, None, None, None, [], "", 0.2, 0.0, 0.0, None)
    before = len(os.listdir("/proc/self/task"))
    torch.set_num_threads(2)
    {call}
    print(len(os.listdir("/proc/self/task")) - before)
"""
CALLS = {
    "forward": "attention_ops.attention(x, x, x)",
    "backward": "torch.ops.attention_ops._attention_backward(x, x, x, None, None, None, [], '', 0.2, 0.0, 0.0, None, "
    "out, lse, x, None, [True] * 3 + [False] * 3)",
    "weights": "attention_ops.attention_weights(x, x)",
    "dropout_mask": "attention_ops.dropout_mask(torch.tensor([1]), 2, 8, 512, 512, 0.5)",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_large_call_uses_a_second_thread(name):
    assert int(run_alone(COUNT.format(call=CALLS[name]))) >= 1


FORK = """
    import os, sys, time, torch, attention_ops
    torch.set_num_threads(2)
    x = [{tensor}.requires_grad_() for _ in range(3)]
    grad = torch.ones(x[0].shape)  # here, for torch may use threads of its own

    def work():
        out = attention_ops.attention(*x, mask="causal")
        return [t.detach().numpy().tobytes() for t in (out, *torch.autograd.grad(out, x, grad))]

    wanted = work()
    child = os.fork()
    if child == 0:
        {setting}
        os._exit(0 if work() == wanted else 3)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        sys.exit("the child hung")
    print(os.waitstatus_to_exitcode(status))
"""


TENSORS = {
    "contiguous": "torch.randn(1, 2, 256, 32)",
    "packed": "torch.randn(1, 1100, 8, 64).transpose(1, 2)[:, :2].detach()",  # rows 2 KiB apart, which are copied
}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("setting", ["pass", "torch.set_num_threads(1)"])
def test_fork_after_use(setting, tensor):
    """As a forked DataLoader worker does, which sets one thread; and without that."""
    assert run_alone(FORK.format(setting=setting, tensor=TENSORS[tensor])) == "0"
