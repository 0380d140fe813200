"""Runs a piece of Python in a process of its own, so that its memory, threads and environment are its own, or a
function in several processes that talk to each other."""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable

import torch
from torch import distributed, multiprocessing

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_alone(code: str, timeout: float = 120, **environment: str) -> str:
    """What the code prints; its failure is this test's failure."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def extra_memory(call: str, small: int, large: int) -> float:
    """MiB at the peak of call(large) beyond what a process holds after call(small); `call` defines the function."""
    code = """
import pathlib, torch, attention_ops
from attention_ops import masks

torch.set_num_threads(2)

def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024

{call}
call({small})
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak from here on, not that of the imports
before = memory("VmRSS")
call({large})
print(memory("VmHWM") - before)
"""
    return float(run_alone(code.format(call=textwrap.dedent(call), small=small, large=large), timeout=180))


def run_together(work: Callable[..., None], *arguments: object, count: int = 2, timeout: float = 120) -> None:
    """Calls work(rank, *arguments) in `count` processes that form a gloo group; one's failure is this test's failure.

    They meet through a file, so that no port has to be free.
    """
    with tempfile.TemporaryDirectory() as folder:
        group = multiprocessing.spawn(_member, (count, folder, work, arguments), nprocs=count, join=False)
        deadline = time.monotonic() + timeout
        try:
            while not group.join(timeout=1):
                assert time.monotonic() < deadline, f"{work.__name__}: expected its end within {timeout} s"
        finally:
            for process in group.processes:
                process.kill()


def _member(rank: int, count: int, folder: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wait = datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", f"file://{folder}/group", wait, world_size=count, rank=rank)
    work(rank, *arguments)
    distributed.destroy_process_group()
