"""`attention_ops.attention` against torch's scaled_dot_product_attention, case by case.

    python benchmarks/bench_attention.py --quick          # under two minutes
    python benchmarks/bench_attention.py --readme         # all cases; fills in the table of README.md

FLOPs count visible (query, key) pairs alone: 2 (D + Dv) forward, 6 D + 4 Dv backward.
"""

import argparse
import dataclasses
import os
import pathlib
import sys

import torch
import torch.nn.functional as F
from harness import BUILD, Probe, Row, Workload, best_vector_bytes, fill_readme, measure, processor, write, write_json
from torch import Tensor

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of one measurement; the name is made from what differs from the plain case."""

    batch: int = 1
    heads: int = 4
    length: int = 2048
    width: int = 64
    kind: str = "full"  # full, causal, window, documents
    backward: bool = False
    dtype: str = "fp32"
    key_heads: int = 0  # 0: as many as heads
    value_width: int = 0  # 0: as wide as the key
    queries: int = 0  # 0: as many as keys
    dropout_p: float = 0.0
    bias: bool = False  # [1, H, Lq, Lk], with its gradient
    quick: bool = False  # part of --quick

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        key_heads, queries = self.key_heads or self.heads, self.queries or self.length
        query = (self.batch, self.heads, queries, self.width)
        key = (self.batch, key_heads, self.length, self.width)
        return query, key, (self.batch, key_heads, self.length, self.value_width or self.width)

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads else f"{self.heads}"
        words = [self.dtype, self.kind, "fwd+bwd" if self.backward else "fwd", f"B{self.batch} H{heads}"]
        words.append(f"{self.queries}×{self.length}" if self.queries else f"S{self.length}")
        words.append(f"D{self.width}/{self.value_width}" if self.value_width else f"D{self.width}")
        if self.dropout_p:
            words.append(f"dropout {self.dropout_p}")
        return " ".join([*words, "bias gradient"] if self.bias else words)

    def flops(self, visible: int) -> float:
        d, dv = self.width, self.value_width or self.width
        return self.batch * self.heads * visible * (2 * (d + dv) + (6 * d + 4 * dv) * self.backward)


def pair(**options: object) -> list[Case]:
    """A case forward, and forward with backward."""
    return [Case(**options), Case(**options, backward=True)]


CASES = [
    *pair(batch=16, heads=8, length=64, width=32, kind="causal", quick=True),
    *pair(batch=8, heads=8, length=128, width=64),
    *pair(batch=8, heads=8, length=128, width=64, kind="causal"),
    *pair(batch=4, heads=8, length=256, width=64, kind="causal", quick=True),
    *pair(heads=8, length=512),
    *pair(heads=8, length=512, kind="causal", quick=True),
    *pair(heads=8, length=512, width=128),
    *pair(heads=8, length=512, width=128, kind="causal"),
    *pair(quick=True),
    *pair(kind="causal", quick=True),
    *pair(width=128),
    *pair(width=128, kind="causal"),
    *pair(dtype="bf16", quick=True),
    *pair(dtype="bf16", width=128),
    *pair(dtype="fp16"),
    Case(dtype="bf16", backward=True, kind="causal"),
    *pair(heads=8, key_heads=2, quick=True),
    Case(heads=8, key_heads=2, kind="causal", backward=True),
    *pair(value_width=32),
    Case(dropout_p=0.1, quick=True),
    Case(dropout_p=0.1, backward=True),
    Case(bias=True, backward=True, quick=True),
    *pair(heads=2, length=8192, kind="window"),
    *pair(heads=2, length=8192, kind="documents"),
    Case(heads=8, length=32768, queries=1, quick=True),
    Case(heads=8, length=16384, queries=1, width=128, dtype="bf16"),
    Case(heads=8, key_heads=2, length=32768, queries=1),
    *pair(heads=1, length=16, width=16, quick=True),
]
WINDOW, DOCUMENT = 256, 512


def visibility(case: Case) -> tuple[object, dict[str, object], int]:
    """Our mask, the peer's arguments for the same, and how many pairs it leaves visible in a head."""
    from attention_ops import masks

    length, queries = case.length, case.queries or case.length
    if case.kind == "full":
        return None, {}, queries * length
    if case.kind == "causal":
        return masks.causal(), {"is_causal": True}, length * (length + 1) // 2
    if case.kind == "window":
        mask = masks.sliding_window(WINDOW - 1, 0)
    else:
        mask = masks.document(torch.arange(length) // DOCUMENT)
    dense = mask.dense(1, 1, length, length)
    return mask, {"attn_mask": dense.contiguous()}, int(dense.sum())


def workload(case: Case) -> Workload:
    import attention_ops

    torch.manual_seed(0)
    dtype = TYPES[case.dtype]
    inputs = [torch.randn(shape).to(dtype).requires_grad_(case.backward) for shape in case.shapes]
    mask, peer_options, visible = visibility(case)
    bias = None
    if case.bias:
        bias = torch.randn(1, case.heads, case.length, case.length).requires_grad_(case.backward)
        peer_options["attn_mask"] = bias
    shape = (*case.shapes[0][:-1], case.shapes[2][-1])
    grad_out = torch.randn(shape).to(dtype)
    leaves = [x for x in (*inputs, bias) if x is not None]

    def run(out: Tensor) -> None:
        if case.backward:
            torch.autograd.grad(out, leaves, grad_out)

    def ours() -> None:
        run(attention_ops.attention(*inputs, mask=mask, bias=bias, dropout_p=case.dropout_p))

    def peer() -> None:
        options = {**peer_options, "dropout_p": case.dropout_p, "enable_gqa": bool(case.key_heads)}
        run(F.scaled_dot_product_attention(*inputs, **options))

    reads_memory = bool(case.queries)
    read = sum(x.numel() * x.element_size() for x in inputs[1:]) if reads_memory else 0
    return Workload(case.name, ours, peer, flops=0 if reads_memory else case.flops(visible), bytes=read)


def run_cases(cases: list[Case], threads: list[int], seconds: float) -> list[Row]:
    probe = Probe(best_vector_bytes())
    rows = []
    for case in cases:
        for count in threads:
            torch.set_num_threads(count)
            row = measure(workload(case), probe, seconds, least_pairs=3)
            rows.append(row)
            line = f"{row.name:44} {count} threads  {row.speedup:7.2f} x  {100 * row.of_peak:4.0f} % of {row.limit}"
            print(line, file=sys.stderr, flush=True)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter; under two minutes")
    parser.add_argument("--isa", help="the instruction set to measure (as ATTENTION_OPS_ISA)")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts; one and all cores if not given")
    parser.add_argument("--seconds", type=float, help="for each case and thread count (3; 0.5 with --quick)")
    parser.add_argument("--filter", default="", help="only cases whose name holds this text")
    parser.add_argument("--out", type=pathlib.Path, default=BUILD, help="folder of the table and the picture")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows as JSON to this file")
    parser.add_argument("--readme", action="store_true", help="also fill in the table of README.md")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.isa:
        os.environ["ATTENTION_OPS_ISA"] = arguments.isa
    import attention_ops

    cases = [c for c in CASES if (c.quick or not arguments.quick) and arguments.filter in c.name]
    if not cases:
        sys.exit(f"bench: expected --filter a part of a case's name, got {arguments.filter!r}")
    cores = torch.get_num_threads()
    threads = arguments.threads or ([cores] if arguments.quick else sorted({1, cores}))
    rows = run_cases(cases, threads, arguments.seconds or (0.5 if arguments.quick else 3.0))
    title = f"{processor()}, {cores} cores; torch {torch.__version__}; instruction set {attention_ops.isa()}."
    text = write(rows, title, arguments.out, "attention")
    print(text)
    if arguments.json:
        write_json(rows, title, arguments.json)
    if arguments.readme:
        fill_readme(text, pathlib.Path(__file__).resolve().parent.parent / "README.md")


if __name__ == "__main__":
    main()
