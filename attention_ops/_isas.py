"""The instruction sets that the CPU kernels are compiled for. The build and the loader both read this table."""

import ctypes
import functools
import os
import pathlib
import platform
import sys
import typing


@functools.cache
def _processor() -> dict[str, str]:
    """What the operating system tells of the first processor, as /proc/cpuinfo names it."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


@functools.cache
def _may_use_tiles() -> bool:
    """Asks the kernel to let this process, and what it forks, use the registers of the matrix unit."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request, tile_data) == 0


def _has_whole_pairs() -> bool:
    """vdpbf16ps runs at the rate of a fused multiply-add, so twice the products, on AMD; elsewhere at half of it."""
    return _processor().get("vendor_id") == "AuthenticAMD"


def _always() -> bool:
    return True


class Isa(typing.NamedTuple):
    machines: frozenset[str]  # as platform.machine() names them; empty: those that have no row without needs
    flags: tuple[str, ...]  # for the compiler
    needs: frozenset[str]  # flags of the processor, as /proc/cpuinfo names them
    allowed: typing.Callable[[], bool] = _always  # whether it runs here, beyond the flags
    faster: typing.Callable[[], bool] = _always  # than the one before it, on this processor


X86 = frozenset({"x86_64", "AMD64"})
ARM = frozenset({"aarch64", "arm64"})
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512")
NEEDS_AVX2 = frozenset({"avx2", "fma", "f16c"})
NEEDS_AVX512 = NEEDS_AVX2 | {"avx512f", "avx512dq", "avx512vl", "avx512bw"}

# From the one that runs everywhere to the best.
ISAS = {
    "baseline": Isa(frozenset(), (), frozenset()),
    "avx2": Isa(X86, AVX2, NEEDS_AVX2),
    "avx512": Isa(X86, AVX2 + AVX512, NEEDS_AVX512),
    "avx512_bf16": Isa(X86, AVX2 + AVX512 + ("-mavx512bf16",), NEEDS_AVX512 | {"avx512_bf16"}, faster=_has_whole_pairs),
    "amx": Isa(
        X86,
        AVX2 + AVX512 + ("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        NEEDS_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
        allowed=_may_use_tiles,
    ),
    "neon": Isa(ARM, (), frozenset()),
}


def buildable() -> list[str]:
    """The instruction sets of this kind of machine, from the one that all of its processors run."""
    own = [name for name, isa in ISAS.items() if platform.machine() in isa.machines]
    return own if any(not ISAS[name].needs for name in own) else ["baseline", *own]


def wanted() -> list[str]:
    """What is to be built: `ATTENTION_OPS_ISAS` names some, or is `native`, the best one here; else all."""
    names = os.environ.get("ATTENTION_OPS_ISAS", "").split()
    if names == ["native"]:
        return [best(buildable())]
    if not set(names) <= set(buildable()):
        expected = ", ".join(buildable())
        sys.exit(f"attention_ops: expected ATTENTION_OPS_ISAS native, or some of {expected}, got {' '.join(names)}")
    return [name for name in buildable() if name in names or not names]


def processor_flags() -> frozenset[str]:
    """What this processor and its operating system offer."""
    return frozenset(_processor().get("flags", _processor().get("Features", "")).split())


def runs(name: str) -> bool:
    """Whether an instruction set runs here. Asking for `amx` asks the operating system for its registers."""
    return ISAS[name].needs <= processor_flags() and ISAS[name].allowed()


def runnable() -> list[str]:
    """The instruction sets that run here, in the order of the table."""
    return [name for name in buildable() if runs(name)]


def best(built: list[str]) -> str | None:
    """Of those that were built, the one to take here, if any runs."""
    here, order = [name for name in runnable() if name in built], list(ISAS)
    taken = (n for n in reversed(here) if ISAS[n].faster() or order[order.index(n) - 1] not in here)
    return next(taken, None)
