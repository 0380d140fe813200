"""Paired measurements: ours and the peer in turn in one process, with the machine's peak probed between them.

A shared machine changes its speed from second to second, so no time stands alone here: every number that is
reported is the median of ratios of neighbours in time.
"""

import ctypes
import dataclasses
import math
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

FOLDER = pathlib.Path(__file__).resolve().parent
BUILD = FOLDER.parent / "build" / "benchmarks"
PROBE_FLAGS = {64: ["-mavx512f", "-mfma"], 32: ["-mavx2", "-mfma"], 16: []}  # by the bytes of a vector


@dataclasses.dataclass(frozen=True)
class Workload:
    """Two functions that do the same, and how much work that is."""

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    flops: float = 0.0  # multiplications and additions on visible pairs
    bytes: float = 0.0  # set instead of flops where reading memory is the limit
    scale: float = 1.0  # multiplies the ratio of the times


@dataclasses.dataclass(frozen=True)
class Row:
    """What one workload gave: medians over the pairs."""

    name: str
    threads: int
    pairs: int
    ours_ms: float
    peer_ms: float
    speedup: float  # the peer's time over ours
    low: float  # quartiles of it
    high: float
    of_peak: float  # ours, as a part of the probed limit
    peer_of_peak: float
    limit: str


class Probe:
    """The peak of multiply-adds and of reading, on as many threads as torch uses at the time."""

    def __init__(self, vector_bytes: int):
        self.library = ctypes.CDLL(str(compile_probe(vector_bytes)))
        self.library.probe_multiply_add.restype = self.library.probe_read.restype = ctypes.c_double
        self.data = torch.ones(1 << 25)  # 128 MB, in no cache

    def gflops(self, seconds: float = 0.004) -> float:
        return self._together(lambda _: self.library.probe_multiply_add(ctypes.c_double(seconds)))

    def read(self) -> float:
        """GB/s."""
        part = self.data.numel() // torch.get_num_threads()
        address, size = self.data.data_ptr(), ctypes.c_size_t(part)
        return self._together(lambda n: self.library.probe_read(ctypes.c_void_p(address + 4 * n * part), size))

    @staticmethod
    def _together(work: Callable[[int], float]) -> float:
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of the interpreter's lock
            return sum(pool.map(work, range(threads)))


def compile_probe(vector_bytes: int) -> pathlib.Path:
    library = BUILD / f"probe{vector_bytes}.so"
    source = FOLDER / "probe.c"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-shared", "-fPIC", f"-DWIDTH={vector_bytes}", *PROBE_FLAGS[vector_bytes]]
        subprocess.run(["gcc", *flags, str(source), "-o", str(library)], check=True)
    return library


def best_vector_bytes() -> int:
    """Of this processor: the peak is the machine's, whichever instruction set is measured against it."""
    capability = torch.backends.cpu.get_cpu_capability()
    return 64 if "AVX512" in capability else 32 if "AVX2" in capability else 16


def timed(function: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats


def warm_time(function: Callable[[], object]) -> float:
    """Of one call. The first are slower by far, and a small workload that is repeated too seldom stays as cold."""
    function()  # torch, too, makes and imports things once
    best, spent = math.inf, 0.0
    while spent < 0.01:
        last = timed(function, 1)
        best, spent = min(best, last), spent + last
    return best


def measure(work: Workload, probe: Probe, seconds: float, least_pairs: int) -> Row:
    """A B A B ... for about so many seconds; the order within a pair alternates too."""
    repeats = [max(1, int(0.003 / warm_time(function))) for function in (work.ours, work.peer)]
    ours, peer, limits = [], [], []
    begin = time.perf_counter()
    while len(ours) < least_pairs or time.perf_counter() - begin < seconds:
        limits.append(probe.read() if work.bytes else probe.gflops())
        if len(ours) % 2 == 0:
            ours.append(timed(work.ours, repeats[0]))
            peer.append(timed(work.peer, repeats[1]))
        else:
            peer.append(timed(work.peer, repeats[1]))
            ours.append(timed(work.ours, repeats[0]))
    return summarise(work, ours, peer, limits)


def summarise(work: Workload, ours: list[float], peer: list[float], limits: list[float]) -> Row:
    ratios = sorted(work.scale * b / a for a, b in zip(ours, peer, strict=True))
    quarter = len(ratios) // 4
    amount = 1e-9 * (work.bytes or work.flops)

    def of_peak(times: list[float]) -> float:
        return statistics.median(amount / t / limit for t, limit in zip(times, limits, strict=True))

    return Row(
        name=work.name,
        threads=torch.get_num_threads(),
        pairs=len(ratios),
        ours_ms=1e3 * statistics.median(ours),
        peer_ms=1e3 * statistics.median(peer),
        speedup=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[-1 - quarter],
        of_peak=of_peak(ours),
        peer_of_peak=of_peak(peer),
        limit="read" if work.bytes else "FMA",
    )
