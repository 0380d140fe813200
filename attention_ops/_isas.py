"""The instruction sets that the CPU kernels are compiled for. The build and the loader both read this table."""

import pathlib
import platform
import typing


class Isa(typing.NamedTuple):
    machines: frozenset[str]  # as platform.machine() names them; empty: those that have no row without needs
    flags: tuple[str, ...]  # for the compiler
    needs: frozenset[str]  # flags of the processor, as /proc/cpuinfo names them


X86 = frozenset({"x86_64", "AMD64"})
ARM = frozenset({"aarch64", "arm64"})
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512")

# From the one that runs everywhere to the best.
ISAS = {
    "baseline": Isa(frozenset(), (), frozenset()),
    "avx2": Isa(X86, AVX2, frozenset({"avx2", "fma", "f16c"})),
    "avx512": Isa(
        X86, AVX2 + AVX512, frozenset({"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512vl", "avx512bw"})
    ),
    "neon": Isa(ARM, (), frozenset()),
}


def buildable() -> list[str]:
    """The instruction sets of this kind of machine, from the one that all of its processors run."""
    own = [name for name, isa in ISAS.items() if platform.machine() in isa.machines]
    return own if any(not ISAS[name].needs for name in own) else ["baseline", *own]


def processor_flags() -> frozenset[str]:
    """What this processor and its operating system offer."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), ":")
    return frozenset(line.partition(":")[2].split())


def runnable() -> list[str]:
    """The instruction sets that run here, the best one last."""
    flags = processor_flags()
    return [name for name in buildable() if ISAS[name].needs <= flags]
