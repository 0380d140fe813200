"""What the examples of derivatives share: options, and one training step on attention_ops and on torch's SDPA."""

import argparse
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

OURS, PEER = "attention_ops", "torch SDPA, math"  # of torch's backends only the math one has these derivatives
STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
Step = Callable[[], list[Tensor]]  # the gradients of one training step
Make = Callable[[int, int, str], Step]  # of so many things of such a size, by an operator


def attention_of_torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def parse(description: str, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps ({steps})")
    parser.add_argument("--quick", action="store_true", help="a small problem and few steps")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo"), help="folder of the picture (demo)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (1)")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)  # arguments of Make
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.memory_of:
        arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def largest_difference(ours: Step, peer: Step) -> float:
    """Of the two steps' gradients, relative to the largest."""
    found, wanted = (torch.cat([g.flatten() for g in step()]) for step in (ours, peer))
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def verify(differences: dict[str, float]) -> list[str]:
    """Prints what must be rounding alone; returns what is more."""
    for name, value in differences.items():
        print(f"{name} {value:.0e}")
    return [f"{name} {value:.1e}" for name, value in differences.items() if not value < 1e-6]


def memory(field: str) -> float:
    """A line of this process's /proc/self/status in MiB: VmRSS (now) or VmHWM (its peak)."""
    return int(STATUS.read_text().split(field + ":")[1].split()[0]) / 1024


def print_peak(make: Make, count: str, size: str, name: str) -> None:
    """What a step takes above what the process holds, in MiB; for a process of its own (see peak_alone)."""
    make(2, 8, name)()  # warms up
    step = make(int(count), int(size), name)
    CLEAR.write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    step()
    print(memory("VmHWM") - before)


def peak_alone(*arguments: str) -> float:
    """What this script prints by print_peak in a fresh process; nan where the system does not count."""
    if not CLEAR.exists():
        return math.nan
    command = [sys.executable, *arguments]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds over A B A B ..., so that whatever else the machine does slows all alike; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    return {name: 1000 * statistics.median(times[1:]) for name, times in seconds.items()}


def compare(make: Make, sizes: list[tuple[int, int]], unit: str, quick: bool) -> None:
    """A table of time and memory."""
    threads = torch.get_num_threads()
    options = [f"--threads={threads}", *(["--quick"] if quick else [])]
    print(f"\n{'a training step of':20}{'':18}{'time':>12}{'memory':>14}")
    for count, size in sizes[: 1 if quick else None]:
        times = medians({name: make(count, size, name) for name in (OURS, PEER)}, rounds=1 if quick else 7)
        for name, milliseconds in times.items():
            peak = peak_alone(sys.argv[0], *options, "--memory-of", str(count), str(size), name)
            print(f"{f'{count} × {size} {unit}':20}{name:18}{milliseconds:9,.0f} ms{peak:10,.0f} MiB")
    print(f"Medians of turns A B A B ... (threads: {threads}); memory is the peak above that before the step.")
