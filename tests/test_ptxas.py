"""What the assembler says of the kernels: registers, spills, and the limits of the architectures."""

import re

import nvcc
import pytest

pytestmark = pytest.mark.skipif(nvcc.missing() is not None, reason=str(nvcc.missing()))
REGISTERS = 65536  # of a block at most, from 8.0 on
TENSOR = ("tensor_forward", "tensor_keys", "tensor_queries")
RELEASE = "13.0"  # of nvcc, whose spills are known
# Bytes that a thread spills at most, stores and loads together, for 8.0: for each shape its width and whether it has
# extras. What is not here spills nothing.
SPILLED = {
    ("ForwardShape", 128, False): 304,
    ("TensorShape", 256, False): 244,  # the forward of wide rows where there is shared memory for it
    ("KeysShape", 64, False): 64,
    ("KeysShape", 128, True): 172,
    ("KeysShape", 256, False): 8,
    ("KeysShape", 256, True): 180,
    ("QueriesShape", 128, False): 64,
}


def shape(kernel: nvcc.Kernel) -> tuple[str, int, bool]:
    name, width, extra = re.search(r"ENS_\d+(\w+?Shape)ILi(\d+)E.*?Lb(\d)E", kernel.name).groups()
    return name, int(width), extra == "1"


@pytest.mark.skipif(nvcc.release() != RELEASE, reason=f"spills are known of nvcc {RELEASE}, here is {nvcc.release()}")
@pytest.mark.parametrize("file", TENSOR)
def test_what_tiles_on_tensor_cores_spill(file):
    for kernel in nvcc.kernels(file, "sm_80"):
        assert kernel.spilled <= SPILLED.get(shape(kernel), 0), kernel


@pytest.mark.parametrize("file", [*TENSOR, "simt"])
def test_a_block_finds_its_registers(file):
    """They are given out to warps in units of 256, which is 8 for each thread."""
    kernels = nvcc.kernels(file, "sm_80")
    assert len(kernels) == len(re.findall(r"\.entry ", nvcc.ptx(file).read_text()))
    for kernel in kernels:
        assert kernel.threads * (-(-kernel.registers // 8) * 8) <= REGISTERS, kernel
