"""The examples run, say what they found and draw their pictures."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: other tests are at work on the other cores.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_train_gpt(tmp_path: pathlib.Path) -> None:
    done = run("examples/train_gpt.py", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "attention_ops" in done.stdout
    assert "torch SDPA" in done.stdout
    for name in ("loss.png", "attention.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_readme() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    for block in blocks:
        exec(block, {})
