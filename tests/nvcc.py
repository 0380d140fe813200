"""What nvcc makes of the CUDA kernels, where it is installed: their PTX, and what its assembler says of them.

python tests/nvcc.py              compiles all kernels and says what each takes
python tests/nvcc.py --missing    says why that cannot be done, or fails where it can
python tests/nvcc.py --release    says which nvcc there is
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = runpy.run_path(str(ROOT / "attention_ops" / "_cuda.py"))  # the package may not be built yet
FILES = tuple(sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")))


@functools.cache
def missing() -> str | None:
    """Why the kernels cannot be compiled."""
    root = CUDA["find_root"]()
    if root is None:
        return "no nvcc on PATH and none in CUDA_HOME"
    version = release()
    return f"nvcc {version} is older than 12, the first with C++20" if int(version.split(".")[0]) < 12 else None


def release() -> str | None:
    root = CUDA["find_root"]()
    return CUDA["version_of"](root) if root else None


def tool(name: str) -> pathlib.Path:
    return pathlib.Path(CUDA["find_root"]()) / "bin" / name


@functools.cache
def folder() -> pathlib.Path:
    """Where results are kept: one folder for each state of the sources and of the compiler."""
    state = hashlib.sha256(subprocess.run([tool("nvcc"), "--version"], capture_output=True, check=True).stdout)
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".h", ".cuh", ".cu") and {"cuda", "kernels"} & set(path.parts):
            state.update(path.read_bytes())
    return ROOT / "build" / "nvcc" / state.hexdigest()[:16]


@contextlib.contextmanager
def alone(file: str) -> Iterator[None]:
    """With a file of csrc/cuda: several processes and threads may want it."""
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: object) -> str:
    done = subprocess.run([str(x) for x in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr[-5000:]}")
    return done.stdout + done.stderr


def ptx(file: str) -> pathlib.Path:
    """The PTX of a file of csrc/cuda for compute capability 8.0, with the lines of its source."""
    result = folder() / f"{file}.ptx"
    with alone(file):
        if not result.exists():
            partly = result.with_suffix(".part")
            source = f"csrc/cuda/{file}.cu"
            flags = [*CUDA["COMMON_FLAGS"], f"-arch={CUDA['VIRTUAL']}", "-lineinfo", "-ptx"]
            run(tool("nvcc"), *flags, source, "-o", partly)
            partly.rename(result)
    return result


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    threads: int  # of a block, at most
    blocks: int  # that a multiprocessor is to have at least
    registers: int
    spilled: int  # bytes


def assembled(file: str, architecture: str) -> str:
    """What the assembler says of a file, and the linker where kernels call functions that are compiled once."""
    source = ptx(file)
    log = source.with_suffix(f".{architecture}.log")
    with alone(file):
        if not log.exists():
            binary, flags = source.with_suffix(f".{architecture}.cubin"), ["-v", f"-arch={architecture}"]
            if CUDA["relocatable"](f"{file}.cu"):
                says = run(tool("ptxas"), *flags, "-c", CUDA["MOST_REGISTERS"], source, "-o", binary)
                says += run(tool("nvlink"), *flags, binary, "-o", binary.with_suffix(".linked"))
            else:
                says = run(tool("ptxas"), *flags, source, "-o", binary)
            log.write_text(says)
    return log.read_text()


def spills(file: str, architecture: str) -> dict[str, int]:
    """Bytes that each kernel spills, stores and loads together, with those of its copies of functions; or, where these
    are called, that each kernel and each function spills."""
    copies = not CUDA["relocatable"](f"{file}.cu")
    total: dict[str, int] = {}
    kernel = ""
    said = r"entry function '(\w+)'|Function properties for (\w+)\n.* (\d+) bytes spill stores, (\d+) bytes spill loads"
    for entry, name, stores, loads in re.findall(said, assembled(file, architecture)):
        if entry:
            kernel = entry
        else:
            owner = kernel if copies else name
            total[owner] = total.get(owner, 0) + int(stores) + int(loads)
    return total


def kernels(file: str, architecture: str) -> list[Kernel]:
    """What the compiler's log says of the kernels of a file."""
    bounds = r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+).*\s*(?:\.minnctapersm (\d+))?"
    asked = {
        name: (int(threads), int(blocks or 1)) for name, threads, blocks in re.findall(bounds, ptx(file).read_text())
    }
    linked = r"Function properties for '(\w+)'.*\n.*used (\d+) registers"
    whole = r"entry function '(\w+)'(?:.*\n)+?.*Used (\d+) registers"
    said = re.findall(linked if CUDA["relocatable"](f"{file}.cu") else whole, assembled(file, architecture))
    spilled = spills(file, architecture)
    return [Kernel(name, *asked[name], int(used), spilled[name]) for name, used in said]


def main() -> None:
    if "--missing" in sys.argv:
        print(missing())
        sys.exit(missing() is None)
    if "--release" in sys.argv:
        print(release() or "")
        return
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count()))) as pool:
        for found in pool.map(lambda file: kernels(file, "sm_80"), FILES):
            for kernel in found:
                takes = f"{kernel.threads:4} threads, {kernel.registers:3} registers, {kernel.spilled:4} bytes spilled"
                print(f"{takes}: {kernel.name}", flush=True)


if __name__ == "__main__":
    main()
