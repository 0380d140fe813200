"""Runs of ours against each other: what a mask, an option or another operator costs, and what a second core gives."""

import dataclasses
from collections.abc import Callable

import torch
from cases import Case, ours, visible_share
from harness import Workload
from torch import Tensor

OPERATORS = torch.ops.attention_ops


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The time of `first` over that of `second`, which is scaled to the pairs that are visible in `first`."""

    name: str
    first: Case
    second: Case
    first_threads: int = 0  # 0: those of the measurement
    second_threads: int = 0

    def workload(self) -> Workload:
        share = visible_share(self.first)
        name = self.name if share == 1 else f"{self.name}, {100 * share:.1f} % visible"
        first = on_threads(ours(self.first), self.first_threads)
        return Workload(name, on_threads(ours(self.second), self.second_threads), first, scale=1 / share)


def on_threads(run: Callable[[], None], threads: int) -> Callable[[], None]:
    if not threads:
        return run

    def run_on_them() -> None:
        torch.set_num_threads(threads)
        run()

    return run_on_them


def to_plain(name: str, backward: bool = True, **options: object) -> Comparison:
    return Comparison(f"{name} / plain", Case(backward=backward, **options), Case(backward=backward))


def to_full(kind: str, **options: object) -> list[Comparison]:
    """A mask's time over its share of the full square's."""
    return [
        Comparison(
            f"{kind} {'fwd+bwd' if backward else 'fwd'} S{options['length']} / its share of full",
            Case(kind=kind, backward=backward, **options),
            Case(backward=backward, **options),
        )
        for backward in (False, True)
    ]


def two_cores(heads: int) -> list[Comparison]:
    """The time on one core over that on two: 2 at best."""
    cases = [Case(heads=heads, length=1024, backward=backward) for backward in (False, True)]
    return [Comparison(f"{case.name}: one core / two", case, case, first_threads=1, second_threads=2) for case in cases]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The time of one private operator over that of another, on the same inputs."""

    name: str
    first: Callable[..., object]
    second: Callable[..., object]

    def workload(self) -> Workload:
        query, key, value, along = (torch.randn(1, 4, 2048, 64) for _ in range(4))
        call = [query, key, value, None, None, None, [], "", 0.125, 0.0, 0.0, None]
        out, lse = OPERATORS._attention_forward(*call)
        return Workload(
            self.name, lambda: self.second(call, out, lse, along), lambda: self.first(call, out, lse, along)
        )


def forward_kernel(call: list, *_: Tensor) -> object:
    return OPERATORS._attention_forward(*call)


def jvp_kernel(call: list, out: Tensor, lse: Tensor, along: Tensor) -> object:
    return OPERATORS._attention_jvp(*call, out, lse, along, along, along, None, None, None)


def backward_kernel(call: list, out: Tensor, lse: Tensor, along: Tensor) -> object:
    return OPERATORS._attention_backward(*call, out, lse, along, None, [True, True, True, False, False, False])


def double_backward_kernel(call: list, out: Tensor, lse: Tensor, along: Tensor) -> object:
    needed = [True, True, True, False, False, False, True, False]
    tangents = (along, along, along, None, None, None, along, None)
    return OPERATORS._attention_double_backward(*call, out, lse, along, None, *tangents, needed)


COMPARISONS = [
    *to_full("causal", length=2048),
    *to_full("window", length=8192, heads=2),
    *to_full("documents", length=8192, heads=2),
    *to_full("blocks", length=8192, heads=2),
    *to_full("padding", length=2048, batch=4),
    to_plain("bias and its gradient", bias=True),
    to_plain("softcap", softcap=20.0),
    to_plain("sinks", sinks=True),
    to_plain("dropout", dropout_p=0.1),
    to_plain("dropout fwd", dropout_p=0.1, backward=False),
    to_plain("weights fwd", operator="weights", backward=False),
    to_plain("summaries fwd", operator="summaries", backward=False),
    to_plain("bf16 fwd", dtype="bf16", backward=False),
    to_plain("bf16", dtype="bf16"),
    to_plain("fp16 fwd", dtype="fp16", backward=False),
    to_plain("fp16", dtype="fp16"),
    to_plain("denormal query, key and value fwd", denormal="qkv", backward=False),
    to_plain("denormal query, key and value", denormal="qkv"),
    to_plain("denormal value", denormal="v"),
    Kernels("jvp / forward, the kernels", jvp_kernel, forward_kernel),
    Kernels("double backward / backward, the kernels", double_backward_kernel, backward_kernel),
    *(comparison for heads in (1, 2, 3, 16) for comparison in two_cores(heads)),
]
