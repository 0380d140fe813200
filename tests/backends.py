"""Where the operators run: on the processor, on the model of a GPU that runs the CUDA kernels there, on a GPU."""

import contextlib
import fcntl
import functools
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

import attention_ops

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = ("cpu", "cuda-model", "cuda")
HAS_GPU = torch.cuda.is_available() and not attention_ops.build_info()["cuda"].startswith("not built")


def library() -> pathlib.Path:
    """Of the model."""
    return ROOT / "build" / f"gpu_model-{torch.__version__}" / "libgpu_model.so"


@functools.cache
def model():
    """The model's operators; its library is built where it is not up to date."""
    folder = library().parent
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may run tests
        jobs = f"-j{os.environ.get('MAX_JOBS', '2')}"
        command = ["make", "-s", jobs, "-C", ROOT / "tests" / "gpu_model", f"BUILD={folder}", f"PY={sys.executable}"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    torch.ops.load_library(library())
    return torch.ops.attention_ops_gpu_model


@contextlib.contextmanager
def on_model(
    lanes: int = 0,
    blocks: int = 0,
    seed: int = 1,
    late_copies: bool = True,
    ptx: bool = False,
    shared_kilobytes: int = 227,
) -> Iterator[None]:
    """CPU tensors go through the CUDA kernels, or their PTX if some is loaded; what the model finds is an error."""
    ops = model()
    ops.set_options(lanes, blocks, seed, late_copies, ptx, shared_kilobytes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel.*")
        ops.use(True)
    try:
        yield
    finally:
        ops.use(False)
        findings = ops.take_findings()
    assert not findings, "\n".join(findings)


@contextlib.contextmanager
def running_on(backend: str) -> Iterator[str]:
    """Gives the device of the tensors."""
    if backend == "cuda-model":
        with on_model():
            yield "cpu"
        return
    if backend == "cuda" and not HAS_GPU:
        pytest.skip(f"no GPU, or kernels for it {attention_ops.build_info()['cuda']}")
    yield backend


def assert_replays(step: Callable[[], Iterable[Tensor]], leaves: list[Tensor]) -> None:
    """A graph of what `step` does computes it from whatever the leaves hold when it is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@contextlib.contextmanager
def less_memory_than(mebibytes: int) -> Iterator[None]:
    """What is done inside allocates no more on the GPU, at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before < mebibytes * 2**20
