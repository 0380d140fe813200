"""Memory: at 16384 tokens the scores would take 1 GiB; a forward and a backward pass take a small part of that."""

import pytest
from processes import run_alone

LENGTH, WIDTH, LIMIT_MB = 16384, 16, 96

CODE = """
    import pathlib, torch, attention_ops
    from attention_ops import masks

    torch.set_num_threads(2)

    def memory(field):
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split(field + ":")[1].split()[0]) / 1024

    def call(L, backward=True):
        q, k, v = (torch.randn(1, 1, L, {width}, requires_grad=True) for _ in range(3))
        result = {call}
        results = [result] if isinstance(result, torch.Tensor) else result
        sum(r.sum() for r in results).backward()

    call(256)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak from here on, not that of the imports
    before = memory("VmRSS")
    call({length})
    print(memory("VmHWM") - before)
"""
CALLS = {
    "plain": "attention_ops.attention(q, k, v)",
    "causal": "attention_ops.attention(q, k, v, mask='causal', softcap=5.0, sinks=torch.randn(1, requires_grad=True))",
    "padding": "attention_ops.attention(q, k, v, mask=masks.padding(torch.tensor([L - 5])) & masks.dilated(3))",
    "bias_keys": "attention_ops.attention(q, k, v, bias=torch.randn(1, 1, 1, L, requires_grad=True))",
    "bias_number": "attention_ops.attention(q, k, v, bias=torch.randn(1, 1, 1, 1, requires_grad=True))",
    "bias_rows": "attention_ops.attention(q, k, v, bias=torch.randn(1, 1, L, 1, requires_grad=True), dropout_p=0.1, "
    "return_lse=True)",
    "summaries": "attention_ops.attention_summaries(q, k, mask='causal')",
    "weights": "attention_ops.attention_weights(q, k, rows=torch.tensor([7, L - 1]))",
}


@pytest.mark.parametrize("name", CALLS)
def test_peak(name):
    peak = float(run_alone(CODE.format(call=CALLS[name], length=LENGTH, width=WIDTH), timeout=180))
    assert peak < LIMIT_MB, f"{peak:.0f} MiB"


def test_the_measure_sees_a_matrix_of_scores():
    call = "torch.softmax(q @ k.mT, -1) @ v"
    assert float(run_alone(CODE.format(call=call, length=8192, width=WIDTH))) > 2 * LIMIT_MB


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
