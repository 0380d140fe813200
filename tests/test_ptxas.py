"""What the compiler's log says of the kernels: registers and spills, and the limits of the architectures."""

import pathlib
import re
import subprocess

import nvcc
import pytest

pytestmark = pytest.mark.skipif(nvcc.missing() is not None, reason=str(nvcc.missing()))
REGISTERS = 65536  # of a block and of a multiprocessor, from 8.0 on
# KiB of shared memory that a block may have.
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
TENSOR = ("tensor_forward", "tensor_keys", "tensor_queries")
WIDE = "TensorShape<256, 8, 1, 64, false>"  # taken only where a block may have its shared memory
RELEASE = "13.0"  # of nvcc, whose spills are known
# Bytes that a thread spills at most, stores and loads together, for 8.0: for each shape its width and whether it has
# extras. What is not here spills nothing.
SPILLED = {
    ("ForwardShape", 128, False): 316,
    ("TensorShape", 256, False): 248,  # the forward of wide rows where there is shared memory for it
    ("KeysShape", 64, False): 88,
    ("KeysShape", 128, False): 64,
    ("KeysShape", 128, True): 232,
    ("KeysShape", 256, False): 48,
    ("KeysShape", 256, True): 204,
    ("QueriesShape", 128, False): 48,
}


def shape(kernel: nvcc.Kernel) -> tuple[str, int, bool]:
    name, width, extra = re.search(r"ENS_\d+(\w+?Shape)ILi(\d+)E.*?Lb(\d)E", kernel.name).groups()
    return name, int(width), extra == "1"


@pytest.mark.skipif(nvcc.release() != RELEASE, reason=f"spills are known of nvcc {RELEASE}, here is {nvcc.release()}")
@pytest.mark.parametrize("file", TENSOR)
def test_what_tiles_on_tensor_cores_spill(file):
    for kernel in nvcc.kernels(file, "sm_80"):
        assert kernel.spilled <= SPILLED.get(shape(kernel), 0), kernel


@pytest.mark.parametrize(
    ("file", "architecture"), [*((file, "sm_80") for file in TENSOR), *(("simt", a) for a in SHARED)]
)
def test_blocks_find_their_registers(file, architecture):
    """They are given out to warps in units of 256, which is 8 for each thread."""
    kernels = nvcc.kernels(file, architecture)
    assert len(kernels) == len(re.findall(r"\.entry ", nvcc.ptx(file).read_text()))
    for kernel in kernels:
        assert kernel.blocks * kernel.threads * (-(-kernel.registers // 8) * 8) <= REGISTERS, kernel


def memories() -> dict[str, str]:
    """The C++ expression of the shared memory that each kind of kernel in the log asks for."""
    names = "\n".join(kernel.name for file in TENSOR for kernel in nvcc.kernels(file, "sm_80"))
    plain = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True).stdout
    tiles = re.findall(r"tensor_(\w+)_kernel<[^,]+, attention_ops::(\w+<[^>]*>)", plain)
    found = {f"{side} {shape}": f"{side.capitalize()}Memory<{shape}>::kBytes" for side, shape in tiles}
    for type_ in ("float", "double"):
        found[f"plain {type_}"] = f"SimtMemory<{type_}>::kBytes"
        found[f"decode {type_}"] = f"DecodeMemory<{type_}, int(kDecodeRows)>::bytes(kDecodeWidth)"
    return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> dict[str, int]:
    """Bytes of shared memory for each kind of kernel, which no log knows: the launch says how many."""
    folder: pathlib.Path = tmp_path_factory.mktemp("shared")
    headers = ("simt_decode", *TENSOR)
    lines = [f'#include "kernels/cuda/{name}.cuh"' for name in headers]
    lines += ["#include <cstdio>", "using namespace attention_ops;", "int main() {"]
    lines += [f'  std::printf("{name}:%d\\n", {expression});' for name, expression in memories().items()]
    (folder / "shared.cpp").write_text("\n".join([*lines, "}", ""]))
    flags = ["-std=c++20", "-w", f"-I{nvcc.ROOT}/tests/gpu_model", f"-I{nvcc.ROOT}/csrc"]
    subprocess.run(["g++", *flags, folder / "shared.cpp", "-o", folder / "shared"], check=True)
    said = subprocess.run([folder / "shared"], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(.*):(\d+)", said)}


@pytest.mark.parametrize("architecture", SHARED)
def test_a_block_finds_its_shared_memory(asked, architecture):
    assert len(asked) == 6 + 1 + 6 + 6 + 4  # shapes of the three tensor-core kernels, and plain ones
    limit = SHARED[architecture] * 1024
    for name, bytes_ in asked.items():
        assert 0 < bytes_ <= limit or WIDE in name, name
