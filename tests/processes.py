"""Runs a piece of Python in a process of its own, so that its memory, threads and environment are its own."""

import os
import pathlib
import subprocess
import sys
import textwrap

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
