"""Builds one library with schemas, checks, derivatives, shapes and casts, one with the CPU kernels for each instruction
set, and one with the CUDA kernels where torch and the machine allow it. ninja compiles: headers are tracked, and
MAX_JOBS says how many files at a time."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit(f"attention_ops: expected setuptools 77 or newer to build it, got {setuptools.__version__}")

ROOT = pathlib.Path(__file__).resolve().parent
TABLE = runpy.run_path(str(ROOT / "attention_ops" / "_isas.py"))
CUDA = runpy.run_path(str(ROOT / "attention_ops" / "_cuda.py"))

FLAGS = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
if os.environ.get("ATTENTION_OPS_WERROR") == "1":  # as this project's own checks do: a warning is an error
    FLAGS.append("-Werror")
KERNEL_FLAGS = ["-O3", "-ffp-contract=off"]
# Registration happens on load and nothing calls in by name, so nothing is exported: no template of one instruction set
# can stand in for another's.
LINK_FLAGS = ["-shared", "-fopenmp", "-Wl,--no-undefined", "-Wl,--version-script=csrc/no_symbols.map"]
COMMON = ("ops", "autograd", "meta", "autocast", "vmap")
CUDA_LIBRARY = "attention_ops.libattention_ops_cuda"

RULES = """\
rule compile
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $out
rule compile_cuda
  command = $nvcc -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $out
rule link_cuda
  command = $nvcc -dlink $flags $in -o $out
  description = link $out
rule link
  command = $cxx $in -o $out $flags
  description = link $out
"""


def sources(*folders):
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / "csrc" / folder).glob("*.cpp"))


def libraries():
    """The files of each library; its flags stand in `flags_of`. What takes longest is begun first."""
    if importlib.util.find_spec("torch") and toolkit().root:  # a source archive needs no torch
        files = (ROOT / "csrc" / "cuda").glob("*.cu")
        cuda = sorted((str(path.relative_to(ROOT)) for path in files), reverse=True)  # those for tensor cores
        yield Extension(CUDA_LIBRARY, [*cuda, *sources("cuda")])
    for isa in TABLE["wanted"]():
        yield Extension(f"attention_ops.libattention_ops_{isa}", sources("cpu"))
    yield Extension("attention_ops.libattention_ops", sources(*COMMON))


@functools.cache
def toolkit():
    return CUDA["find"](import_torch())


def flags_of(name):
    isa = name.removeprefix("attention_ops.libattention_ops").removeprefix("_")
    if name == CUDA_LIBRARY:
        return [*FLAGS, f"-isystem{escaped(toolkit().root)}/include"]
    return [*FLAGS, *KERNEL_FLAGS, *TABLE["ISAS"][isa].flags] if isa else FLAGS


def import_torch():
    try:
        import torch.utils.cpp_extension
    except ImportError:
        sys.exit(
            "attention_ops: expected torch in the environment that builds it, got none; install torch, then run "
            "`pip install --no-build-isolation .`"
        )
    return torch


def check_torch(version):
    """Whether pyproject.toml takes this release; what follows the minor number, as in 2.14.1+cu130, does not count."""
    low, high = re.search(r'"torch(>=[\d.]+),(<[\d.]+)"', (ROOT / "pyproject.toml").read_text()).groups()
    if not numbers(low) <= numbers(version) < numbers(high):
        wanted = f"torch{low},{high}"
        sys.exit(f"attention_ops: expected {wanted} to build it, got {version}; run `pip install '{wanted}'`")


def numbers(version):
    return tuple(int(number) for number in re.search(r"(\d+)\.(\d+)", version).groups())


def find_ninja():
    beside = os.path.join(os.path.dirname(sys.executable), "ninja")
    found = beside if os.path.exists(beside) else shutil.which("ninja")
    if not found:
        sys.exit("attention_ops: expected ninja in the environment that builds it, got none; run `pip install ninja`")
    return found


def jobs():
    """MAX_JOBS, or as many as there are processors and, at two GiB each, memory."""
    if os.environ.get("MAX_JOBS"):
        return os.environ["MAX_JOBS"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return str(max(1, min(len(os.sched_getaffinity(0)), memory >> 31)))


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def escaped(path):
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class BuildLibraries(build_ext):
    """Plain shared libraries without Python in them or in their names, whose objects lie apart."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extensions(self):
        torch = import_torch()
        check_torch(torch.__version__)
        folder = pathlib.Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        cxx = os.environ.get("CXX", "g++")
        compiler = subprocess.run([*cxx.split(), "--version"], capture_output=True, text=True, check=True).stdout
        info = {
            "torch": str(torch.__version__),
            "compiler": compiler.splitlines()[0],
            "cuda": toolkit().says,
        }
        # Everything is compiled again when one of these changes, though no path does.
        write_if_changed(folder / "toolchain.json", json.dumps(info, indent=2) + "\n")
        write_if_changed(folder / "build.ninja", self.ninja_file(torch, cxx, folder))
        verbose = ["-v"] if self.verbose > 1 else []
        built = subprocess.run([find_ninja(), "-f", folder / "build.ninja", "-j", jobs(), *verbose], cwd=ROOT)
        if built.returncode:
            sys.exit(built.returncode)
        self.info_path().write_text(json.dumps({**info, "isas": TABLE["wanted"]()}, indent=2) + "\n")

    def ninja_file(self, torch, cxx, folder):
        paths = torch.utils.cpp_extension
        includes = ["-Icsrc", *(f"-isystem{escaped(path)}" for path in paths.include_paths())]
        torch_folders = [f"-L{escaped(path)}" for path in paths.library_paths()]
        cuda = toolkit()
        cuda_flags = ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xfatbin=-compress-all", cuda.code]
        lines = [RULES, f"builddir = {escaped(folder)}", f"cxx = {cxx}", f"nvcc = {cuda.root}/bin/nvcc -ccbin {cxx}"]
        for extension in self.extensions:
            objects, relocatable = [], []
            for source in extension.sources:
                objects.append(escaped(folder / extension.name / source) + ".o")
                rule = "compile_cuda" if source.endswith(".cu") else "compile"
                if source.endswith(".cu"):
                    flags = [*CUDA["COMMON_FLAGS"], *cuda_flags]
                    if CUDA["relocatable"](source):
                        flags += ["-rdc=true", CUDA["MOST_REGISTERS"]]
                        relocatable.append(objects[-1])
                else:
                    flags = [*flags_of(extension.name), *includes]
                lines.append(f"build {objects[-1]}: {rule} {source} | {escaped(folder / 'toolchain.json')}")
                lines.append(f"  flags = {' '.join(flags)}")
            if relocatable:
                objects.append(escaped(folder / extension.name / "device.o"))
                lines.append(f"build {objects[-1]}: link_cuda {' '.join(relocatable)}")
                lines.append(f"  flags = {' '.join(cuda_flags)}")
            library = escaped(pathlib.Path(self.get_ext_fullpath(extension.name)).resolve())
            lines.append(f"build {library}: link {' '.join(objects)} | csrc/no_symbols.map")
            needs = ["-ltorch_cpu", "-lc10", *(cuda.libraries if extension.name == CUDA_LIBRARY else ())]
            lines.append(f"  flags = {' '.join([*LINK_FLAGS, *torch_folders, *needs])}")
        return "\n".join(lines) + "\n"

    def info_path(self):
        return pathlib.Path(self.build_lib, "attention_ops", "_build.json")

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        self.copy_file(str(self.info_path()), str(ROOT / "attention_ops"))

    def get_outputs(self):
        return [*super().get_outputs(), str(self.info_path())]


class PlainWheel(bdist_wheel):
    """A wheel for any Python on this platform: the libraries contain none."""

    def get_tag(self):
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    setup(ext_modules=list(libraries()), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlainWheel})
