"""Whether the CUDA kernels can be built, and with what: the toolkit's root, the architectures, the compiler's flags."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import typing

# Binary code for each, and PTX, which the driver compiles for later ones.
ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# Kernels call the constexpr functions of the standard library: minimum, maximum, limits.
COMMON_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Icsrc")
# The kernels use nothing that 8.0 has not, so all architectures are assembled from one PTX.
VIRTUAL = "compute_80"
# Of functions that are called, so that two blocks of 256 threads find registers.
MOST_REGISTERS = "-maxrregcount=128"


def relocatable(source: str) -> bool:
    """Whether functions are compiled once and called, not copied into each kernel: so for plain arithmetic, where it
    takes much less time (benchmarks/NOTES.md); kernels on tensor cores keep their registers over a call."""
    return pathlib.PurePath(source).name.startswith("simt")


class Toolkit(typing.NamedTuple):
    root: str | None  # None: the CUDA kernels are not built
    says: str  # the version and the architectures, or why there are none
    code: str = ""  # nvcc's option for the architectures
    libraries: tuple[str, ...] = ()


def find(torch) -> Toolkit:
    """`ATTENTION_OPS_CUDA` is 0 (do not build), 1 (build, or fail) or auto (build where it is possible)."""
    wanted = os.environ.get("ATTENTION_OPS_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"attention_ops: expected ATTENTION_OPS_CUDA one of auto, 0, 1, got {wanted}")
    if wanted == "0":
        return Toolkit(None, "not built: ATTENTION_OPS_CUDA=0")
    reason, root, version = None, None, None
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} has no CUDA"
    elif (root := find_root()) is None:
        reason = "no nvcc on PATH and none in CUDA_HOME"
    elif (version := version_of(root)).split(".")[0] != torch.version.cuda.split(".")[0]:
        reason = f"torch is built with CUDA {torch.version.cuda} and nvcc is {version}"
    if reason is None:
        names = architectures(root)
        return Toolkit(root, f"{version} for {', '.join(names)}", code(names), libraries(root))
    if wanted == "1":
        sys.exit(f"attention_ops: expected what ATTENTION_OPS_CUDA=1 needs, got {reason}")
    return Toolkit(None, f"not built: {reason}")


def find_root() -> str | None:
    """The toolkit's own root. The nvcc on PATH may be a wrapper elsewhere, so it is asked where it lives."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.path.exists(os.path.join(os.environ.get(name, ""), "bin", "nvcc")):
            return os.environ[name]
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", said.stderr + said.stdout, re.M)
    root = pathlib.Path(top[1]).resolve() if top else pathlib.Path(nvcc).resolve().parent.parent
    return str(root) if (root / "include" / "cuda_runtime.h").exists() else None


def version_of(root: str) -> str:
    said = subprocess.run([os.path.join(root, "bin", "nvcc"), "--version"], capture_output=True, text=True, check=True)
    return re.search(r"release (\d+\.\d+)", said.stdout)[1]


def architectures(root: str) -> list[str]:
    """As `TORCH_CUDA_ARCH_LIST` names them, "8.0;9.0+PTX", or those of our own list that nvcc knows."""
    names = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not names:
        command = [os.path.join(root, "bin", "nvcc"), "--list-gpu-code"]
        known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        names = [name for name in ARCHITECTURES if binary(name) in known]
        if not names:
            sys.exit(f"attention_ops: expected an nvcc that knows one of {ARCHITECTURES}, got {' '.join(known)}")
        names[-1] += "+PTX"
    for name in names:
        number = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", name)
        if number is None or int(number[1]) < 8:
            sys.exit(f"attention_ops: expected TORCH_CUDA_ARCH_LIST of numbers from 8.0 on such as 9.0+PTX, got {name}")
    return names


def binary(name: str) -> str:
    """What nvcc calls the code of an architecture; that of 9.0a is no other, since it is made of the PTX of 8.0."""
    return "sm_" + re.sub(r"\D", "", name)


def code(names: list[str]) -> str:
    kinds = [binary(name) for name in names]
    if any(name.endswith("+PTX") for name in names):
        kinds.append(VIRTUAL)
    return f"-gencode=arch={VIRTUAL},code=[{','.join(kinds)}]"


def libraries(root: str) -> tuple[str, ...]:
    folder = next((f for f in ("lib64", "lib") if list(pathlib.Path(root, f).glob("libcudart.so*"))), "lib64")
    return ("-lc10_cuda", f"-L{root}/{folder}", "-lcudart")
