"""What positions cost: attention with each scheme over plain attention, and against torch's SDPA doing the same.

    python benchmarks/bench_positions.py              # B1 H4 S2048 D64, float32, causal
    python benchmarks/bench_positions.py --readme     # also fills in the table of README.md

torch has dense biases alone: ALiBi's is at hand, as its slopes are for ours; T5's is expanded from its table and Shaw's
(rows beside keys alone) from the query's products with them, and their gradients go back the same way.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from bench_rope import rotate_half, tables
from harness import Probe, Workload, best_vector_bytes, measure
from report import comparisons, fill_readme, processor, speedups
from torch import Tensor

import attention_ops
from attention_ops import attention, masks, position, rope, rotary
from attention_ops import nn as ops_nn

HEADS, WIDTH = 4, 64
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The same positions by us and by torch; `parameters` have gradients too."""

    ours: Operator
    peer: Operator
    parameters: tuple[Tensor, ...] = ()


def causally(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    return attention(query, key, value, mask=masks.causal(), **options)


def causally_by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias + hidden)


def hidden_of(length: int) -> Tensor:
    """-inf above the diagonal, [L, L]."""
    return torch.full((length, length), -torch.inf).triu(1)


def rotary_scheme(length: int) -> Scheme:
    cosine, sine = tables(length, WIDTH, torch.float32)

    def peer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = (x * cosine + rotate_half(x) * sine for x in (query, key))
        return causally_by_torch(query, key, value)

    return Scheme(functools.partial(causally, rope=rotary.Rope()), peer)


def rotated_first(length: int) -> Scheme:
    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causally(rope(query), rope(key), value)

    return Scheme(ours, rotary_scheme(length).peer)


def alibi_scheme(length: int) -> Scheme:
    module = ops_nn.AlibiBias(HEADS)
    bias = module(length, length) + hidden_of(length)
    return Scheme(
        lambda q, k, v: causally(q, k, v, distance_bias=module.distance_bias(length, length)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
    )


def t5_scheme(length: int) -> Scheme:
    module, hidden = ops_nn.T5Bias(HEADS, bidirectional=False), hidden_of(length)
    return Scheme(
        lambda q, k, v: causally(q, k, v, distance_bias=module.distance_bias(length, length)),
        lambda q, k, v: dense(q, k, v, module(length, length), hidden),
        tuple(module.parameters()),
    )


def shaw_scheme(length: int) -> Scheme:
    module, hidden = ops_nn.ShawPositions(WIDTH, reach=16, values=False), hidden_of(length)
    row = position.expand(torch.arange(2 * length - 1), length, length)  # [L, L]

    def peer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = module(length, length)["relative_key"]  # [1, 1, 2 L - 1, D]
        products = query @ rows.mT * WIDTH**-0.5  # [B, H, L, 2 L - 1]
        return dense(query, key, value, products.gather(-1, row.expand(*query.shape[:2], -1, -1)), hidden)

    return Scheme(lambda q, k, v: causally(q, k, v, **module(length, length)), peer, tuple(module.parameters()))


SCHEMES = {
    "none": lambda length: Scheme(causally, causally_by_torch),
    "rope": rotary_scheme,
    "rope before": rotated_first,
    "ALiBi": alibi_scheme,
    "T5": t5_scheme,
    "Shaw, keys": shaw_scheme,
}


def call_of(operator: Operator, scheme: Scheme, inputs: list[Tensor], backward: bool) -> Callable[[], object]:
    if not backward:
        return torch.no_grad()(functools.partial(operator, *inputs))
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(operator(*leaves), [*leaves, *scheme.parameters], grad)


def workloads(length: int, against_plain: bool) -> Iterator[Workload]:
    inputs = list(torch.randn(3, 1, HEADS, length, WIDTH).unbind(0))
    plain = SCHEMES["none"](length)
    for name, make in SCHEMES.items():
        scheme = make(length)
        for backward, suffix in ((False, "fwd"), (True, "fwd+bwd")):
            calls = [call_of(f, scheme, inputs, backward) for f in (scheme.ours, scheme.peer)]
            if not against_plain:
                yield Workload(f"{name} {suffix}", *calls)
            elif name != "none":
                yield Workload(f"{name} / none, {suffix}", call_of(plain.ours, plain, inputs, backward), calls[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--readme", action="store_true", help="also fill in the table of README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    probe = Probe(best_vector_bytes())
    costs, rows = (
        [measure(w, probe, arguments.seconds, least_pairs=5) for w in workloads(arguments.length, against_plain)]
        for against_plain in (True, False)
    )
    title = f"{processor()}; torch {torch.__version__}; instruction set {attention_ops.isa()}; B1 H{HEADS}"
    title += f" S{arguments.length} D{WIDTH}, float32, causal."
    text = f"{title}\n\n{comparisons(costs)}\n{speedups(rows)}"
    print(text)
    if arguments.readme:
        fill_readme(text, pathlib.Path(__file__).resolve().parent.parent / "README.md", "positions")


if __name__ == "__main__":
    main()
