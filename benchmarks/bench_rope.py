"""`attention_ops.rope` against the same rotation in plain torch, x cos + rotate_half(x) sin with its tables at hand.

python benchmarks/bench_rope.py
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from harness import Probe, Workload, best_vector_bytes, measure
from report import speedups
from torch import Tensor

from attention_ops import rope, rotary

SHAPES = [(1, 8, 2048, 64), (4, 8, 512, 128), (8, 32, 1, 128), (1, 1, 16, 16)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length)[:, None] * rotary.frequencies(width).inverse  # [L, D / 2]
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    return lambda: torch.autograd.grad(function(leaf), leaf, grad)


def workloads() -> Iterator[Workload]:
    for dtype in TYPES:
        for shape in SHAPES:
            x, (cosine, sine) = torch.randn(shape).to(dtype), tables(shape[2], shape[3], dtype)
            frequencies = rotary.frequencies(shape[3])

            def ours(x: Tensor, frequencies=frequencies) -> Tensor:
                return rope(x, frequencies=frequencies)

            def plain(x: Tensor, cosine=cosine, sine=sine) -> Tensor:
                return x * cosine + rotate_half(x) * sine

            name = f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
            size = 2 * x.nbytes
            yield Workload(f"{name} fwd", lambda x=x, f=ours: f(x), lambda x=x, f=plain: f(x), bytes=size)
            yield Workload(f"{name} fwd+bwd", with_gradient(ours, x), with_gradient(plain, x), bytes=2 * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    probe = Probe(best_vector_bytes())
    print(speedups(measure(work, probe, arguments.seconds, least_pairs=5) for work in workloads()))


if __name__ == "__main__":
    main()
