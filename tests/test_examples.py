"""The examples run, say what they found and draw their pictures."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from attention_ops import attention

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


def numbers(pattern: str, text: str) -> list[float]:
    """Of the first line that begins with the pattern."""
    return [float(x) for x in re.findall(r"\d+\.?\d*", re.search(f"^{pattern}(.*)", text, re.M)[1])]


def check_table(text: str) -> None:
    """Time and memory of a step by both operators."""
    for name in ("attention_ops", "torch SDPA, math"):
        assert re.search(rf"{name} +[\d,]+ ms +([\d,]+|nan) MiB", text), text


def test_force_matching(tmp_path: pathlib.Path) -> None:
    """The script itself checks the energy's symmetries, the forces against quotients, and both operators' gradients."""
    done = run("examples/force_matching.py", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for kind in ("forces: ", "energies: "):
        error, guess = numbers(kind, done.stdout)
        assert error < 0.8 * guess
    check_table(done.stdout)
    assert (tmp_path / "force_matching.png").read_bytes().startswith(b"\x89PNG")


def test_meanflow(tmp_path: pathlib.Path) -> None:
    """The script itself checks the jvp against a quotient, and both operators' gradients."""
    done = run("examples/meanflow.py", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    noise, samples, data = (numbers(name, done.stdout)[:2] for name in ("noise", "samples", "data"))
    for of_noise, of_samples, of_data in zip(noise, samples, data, strict=True):  # mean and deviation of the radius
        assert abs(of_samples - of_data) < 0.7 * abs(of_noise - of_data)
    check_table(done.stdout)
    assert (tmp_path / "meanflow.png").read_bytes().startswith(b"\x89PNG")


def test_length_generalisation(tmp_path: pathlib.Path) -> None:
    """Little training and lengths to 256; the script itself checks that ALiBi holds on text."""
    schemes, scores = ["sinusoidal", "ALiBi", "Shaw"], tmp_path / "scores.json"
    options = ["--quick", "--tasks", "text", "copying", "--schemes", *schemes, "--json", str(scores)]
    done = run("examples/length_generalisation.py", *options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text, copying = (json.loads(scores.read_text())[task] for task in ("text", "copying"))
    assert text["ALiBi"]["256"] - text["ALiBi"]["64"] < 0.03  # bits
    assert text["sinusoidal"]["256"] - text["sinusoidal"]["64"] > 0.05
    assert copying["sinusoidal"]["256"] < 0.6 * copying["sinusoidal"]["64"]
    assert copying["Shaw"]["256"] > 0.9
    assert (tmp_path / "length_generalisation.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    names = {}  # a block goes on where the one before it ended
    for block in blocks:
        exec(block, names)
    torch.testing.assert_close(names["same"], names["out"])
    torch.testing.assert_close(names["step"], names["out"][:, :, -1:])
    torch.testing.assert_close(names["dense"], names["compact"])
    plain = attention(names["query"], names["key"], names["value"])
    for name in ("out", "compact"):  # positions count
        assert not torch.allclose(names[name], plain, atol=1e-4)
