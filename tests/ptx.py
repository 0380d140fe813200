"""Runs the PTX of the CUDA kernels on the model."""

import pathlib
import re
import subprocess
from collections.abc import Iterable

from backends import library, model


def load(modules: Iterable[pathlib.Path]) -> None:
    """Kernels that the model knows by their address are found by the name that the linker gave them."""
    model()
    symbols = subprocess.run(["nm", library()], capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"^([0-9a-f]+) [tTW] (_Z\w*_kernel\w*)$", symbols, re.M)
    model().load_ptx([str(path) for path in modules], [name for _, name in kernels], [int(at, 16) for at, _ in kernels])
