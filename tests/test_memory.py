"""Memory: at 16384 tokens the scores would take 1 GiB; a forward and a backward pass take a small part of that."""

import pytest
from processes import extra_memory, run_alone

LENGTH, LIMIT_MB = 16384, 96

FIRST = """
    def call(L):
        q, k, v = (torch.randn(1, 1, L, 16, requires_grad=True) for _ in range(3))
        result = {call}
        results = [result] if isinstance(result, torch.Tensor) else result
        sum(r.sum() for r in results).backward()
"""
SECOND = """
    def call(L):
        q, k, v = (torch.randn(1, 1, L, 16, requires_grad=True) for _ in range(3))
        def loss(q, k, v):
            result = {call}
            results = [result] if isinstance(result, torch.Tensor) else result
            return sum(r.square().sum() for r in results)
        torch.func.jvp(loss, (q, k, v), (v, q, k))
        grads = torch.autograd.grad(loss(q, k, v), (q, k), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
"""
AGAINST_TORCH = """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(L):
        leaves = [torch.randn(1, 8, L, 64, requires_grad=True) for _ in range(3)]
        with sdpa_kernel(SDPBackend.MATH):
            grads = torch.autograd.grad({function}(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
"""
CALLS = {
    "plain": "attention_ops.attention(q, k, v)",
    "causal": "attention_ops.attention(q, k, v, mask='causal', softcap=5.0, sinks=torch.randn(1, requires_grad=True))",
    "padding": "attention_ops.attention(q, k, v, mask=masks.padding(torch.tensor([L - 5])) & masks.dilated(3))",
    "bias_keys": "attention_ops.attention(q, k, v, bias=torch.randn(1, 1, 1, L, requires_grad=True))",
    "bias_number": "attention_ops.attention(q, k, v, bias=torch.randn(1, 1, 1, 1, requires_grad=True))",
    "bias_rows": "attention_ops.attention(q, k, v, bias=torch.randn(1, 1, L, 1, requires_grad=True), dropout_p=0.1, "
    "return_lse=True)",
    "distance": "attention_ops.attention(q, k, v, distance_bias=torch.randn(1, 1, 2 * L - 1, requires_grad=True), "
    "relative_key=torch.randn(1, 1, 2 * L - 1, 16, requires_grad=True))",
    "distance_bias": "attention_ops.attention(q, k, v, distance_bias=torch.randn(1, 1, 2 * L - 1, requires_grad=True))",
    "summaries": "attention_ops.attention_summaries(q, k, mask='causal')",
    "weights": "attention_ops.attention_weights(q, k, rows=torch.tensor([7, L - 1]))",
}


@pytest.mark.parametrize("name", CALLS)
def test_peak(name):
    peak = extra_memory(FIRST.format(call=CALLS[name]), 256, LENGTH)
    assert peak < LIMIT_MB, f"{peak:.0f} MiB"


@pytest.mark.parametrize("name", ["causal", "padding", "bias_keys", "bias_rows", "distance", "summaries", "weights"])
def test_peak_of_forward_mode_and_second_derivatives(name):
    """At 8192 tokens the scores would take 256 MiB."""
    peak = extra_memory(SECOND.format(call=CALLS[name]), 256, 8192)
    assert peak < LIMIT_MB, f"{peak:.0f} MiB"


def test_second_derivatives_take_a_twentieth_of_the_memory_of_the_formula():
    """Beyond what the caller holds: 3 inputs, out, 3 + 3 gradients, and a cotangent of out and of the first 3."""
    held = (3 + 1 + 3 + 3 + 1 + 3) * 8 * 2048 * 64 * 4 / 2**20
    torchs = "torch.nn.functional.scaled_dot_product_attention"
    ours, formula = (
        min(extra_memory(AGAINST_TORCH.format(function=f), 128, 2048) for _ in range(times)) - held
        for f, times in (("attention_ops.attention", 3), (torchs, 1))  # 46 to 66 MiB, beside builds once 75
    )
    assert 20 * ours < formula, f"{ours:.0f} MiB against {formula:.0f}"


def test_the_measure_sees_a_matrix_of_scores():
    assert extra_memory(FIRST.format(call="torch.softmax(q @ k.mT, -1) @ v"), 256, 8192) > 2 * LIMIT_MB


def test_memory_does_not_grow_over_many_calls():
    code = """
        import resource, torch, attention_ops
        torch.set_num_threads(2)
        x = torch.randn(2, 4, 128, 32, requires_grad=True)
        bias = torch.randn(1, 4, 128, 128, requires_grad=True)
        def call():
            out = attention_ops.attention(x, x, x, bias=bias, mask="causal", dropout_p=0.1)
            torch.autograd.grad(out.sum(), (x, bias))
            attention_ops.attention(x, x, x, bias=bias)  # a graph that is never used
        for _ in range(50): call()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(300): call()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    assert float(run_alone(code)) < 8
