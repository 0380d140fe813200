"""Finds the compiled libraries and loads the common one, the kernels of one instruction set, and those for CUDA."""

import functools
import json
import os
import pathlib

import torch

from . import _isas

FOLDER = pathlib.Path(__file__).resolve().parent
BUILD_INFO = FOLDER / "_build.json"
HOW_TO_BUILD = "build it with `pip install --no-build-isolation .`, or `python setup.py build_ext --inplace` in place"


@functools.cache
def load() -> str:
    """Loads the libraries, once, and returns the instruction set: `ATTENTION_OPS_ISA`, or the best one here."""
    built = _built()
    if _minor(torch.__version__) != _minor(built["torch"]):
        raise ImportError(
            f"attention_ops: expected torch {_minor(built['torch'])}, for which it was compiled, "
            f"got {torch.__version__}; {HOW_TO_BUILD}"
        )
    chosen = _choose(built["isas"])
    names = ["libattention_ops.so", f"libattention_ops_{chosen}.so"]
    if not built["cuda"].startswith("not built") and torch.version.cuda:
        names.append("libattention_ops_cuda.so")
    for name in names:
        if not (FOLDER / name).exists():
            raise ImportError(f"attention_ops: expected {name} in {FOLDER}, got none; {HOW_TO_BUILD}")
        torch.ops.load_library(FOLDER / name)
    return chosen


def isa() -> str:
    """The instruction set of the loaded kernels.

    >>> isa() in build_info()["isas"]
    True
    """
    return load()


def build_info() -> dict[str, object]:
    """With what the libraries were built: `torch`, `compiler`, `isas`; `cuda`, its version and architectures or why it
    is not there; and `isa`, the instruction set in use.

    >>> sorted(build_info())
    ['compiler', 'cuda', 'isa', 'isas', 'torch']
    """
    return {**_built(), "isa": load()}


@functools.cache
def _built() -> dict[str, object]:
    if not BUILD_INFO.exists():
        raise ImportError(
            f"attention_ops: expected its compiled libraries in {FOLDER}, got none; {HOW_TO_BUILD}, "
            "or leave this folder, if it is installed"
        )
    return json.loads(BUILD_INFO.read_text())


def _choose(built: list[str]) -> str:
    forced = os.environ.get("ATTENTION_OPS_ISA")
    if not forced:
        if (best := _isas.best(built)) is None:
            raise ImportError(f"attention_ops: expected kernels that this processor runs, got {', '.join(built)}")
        return best
    if forced not in built or not _isas.runs(forced):
        runnable = ", ".join(name for name in _isas.runnable() if name in built)
        raise ImportError(
            f"attention_ops: expected ATTENTION_OPS_ISA one of {runnable}, which were built and run here, got {forced}"
        )
    return forced


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
