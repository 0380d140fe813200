"""Attention on a GPU against the kernels of torch's SDPA: medians of interleaved runs, in TFLOP/s.

`python benchmarks/bench_cuda.py [--quick] [--json FILE]` prints two Markdown tables: speed by shape, and what options
cost.
"""

import argparse
import json
import pathlib
import statistics
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attention_ops
from attention_ops import masks

PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TOKENS, MODEL = 16384, 2048  # batch · length, heads · width


def sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a peer that refuses a case says why
        return scaled_dot_product_attention(query, key, value, is_causal=causal)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, run in turn, A B A B ..., after three of each that do not count."""
    repeats = {}
    for name, function in list(contenders.items()):
        try:
            milliseconds(function, 3)
            repeats[name] = max(1, min(20, int(3 / milliseconds(function, 1))))
        except RuntimeError:  # a peer that does not take this case
            del contenders[name]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            times[name].append(milliseconds(function, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def inputs(batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(batch, heads, length, width, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


def gradients(forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Callable[[], object]:
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def compare(length: int, width: int, causal: bool, dtype: torch.dtype, rounds: int) -> list[dict]:
    batch, heads = max(1, TOKENS // length), MODEL // width
    leaves = inputs(batch, heads, length, width, dtype)
    grad = torch.randn_like(leaves[0])
    forward = {"ours": lambda: attention_ops.attention(*leaves, mask="causal" if causal else None)}
    forward |= {name: lambda b=backend: sdpa(b, *leaves, causal) for name, backend in PEERS.items()}
    operations = 4 * batch * heads * length**2 * width / (2 if causal else 1)
    rows = []
    for direction, factor in (("forward", 1), ("backward", 2.5)):
        contenders = dict(forward)
        if direction == "backward":
            contenders = {}
            for name, function in forward.items():
                try:
                    contenders[name] = gradients(function, leaves, grad)
                except RuntimeError:
                    continue
        times = medians(contenders, rounds)
        rates = {name: factor * operations / ms / 1e9 for name, ms in times.items()}
        case = {"type": str(dtype).removeprefix("torch."), "D": width, "L": length}
        rows.append({**case, "mask": "causal" if causal else "full", "pass": direction, "ms": times["ours"], **rates})
        print_row(rows[-1])
    return rows


def print_row(row: dict) -> None:
    rates = [f"{row[name]:.0f}" if name in row else "–" for name in ("ours", *PEERS)]
    print(
        "|",
        " | ".join([*(str(row[k]) for k in ("type", "D", "L", "mask", "pass")), f"{row['ms']:.2f}", *rates]),
        "|",
        flush=True,
    )


def options(length: int, rounds: int) -> dict[str, float]:
    """Forward and backward with an option, as a multiple of the plain call."""
    leaves = inputs(2, 16, length, 64, torch.bfloat16)
    grad = torch.randn_like(leaves[0])
    ids = torch.arange(length, device="cuda").div(512, rounding_mode="floor")
    bias = torch.randn(1, 16, 1, length, device="cuda", dtype=torch.bfloat16)
    calls = {
        "plain": {},
        "causal": {"mask": "causal"},
        "window of 256": {"mask": masks.sliding_window(255, 0)},
        "documents of 512": {"mask": masks.document(ids)},
        "softcap": {"softcap": 30.0},
        "bias of keys": {"bias": bias},
        "dropout 0.1": {"dropout_p": 0.1, "seed": torch.tensor([1], device="cuda")},
    }

    def step(more: dict) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention_ops.attention(*leaves, **more), leaves, grad)

    times = medians({name: step(more) for name, more in calls.items()}, rounds)
    return {name: ms / times["plain"] for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rounds = 7 if arguments.quick else 11
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
    print("| type | D | L | mask | pass | ms |", " | ".join(("ours", *PEERS)), "|  (TFLOP/s)")
    print("|" + "---|" * 10)
    rows = []
    for width in (64, 128, 256):
        for length in (2048, 16384) if arguments.quick else (512, 2048, 8192, 16384):
            for causal in (False, True):
                rows += compare(length, width, causal, torch.bfloat16, rounds)
    rows += compare(2048, 64, False, torch.float32, rounds)
    cost = options(4096, rounds)
    for name, ratio in cost.items():
        print(f"| {name} | {ratio:.2f} |")
    if arguments.json:
        info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        pathlib.Path(arguments.json).write_text(json.dumps({**info, "rows": rows, "options": cost}))


if __name__ == "__main__":
    main()
