"""`attention_ops.attention` against torch's scaled_dot_product_attention, case by case, and against itself.

    python benchmarks/bench_attention.py --quick          # under two minutes
    python benchmarks/bench_attention.py --readme         # all cases; fills in the table of README.md

FLOPs count visible (query, key) pairs alone: 2 (D + Dv) forward, 6 D + 4 Dv backward.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable

import torch
from harness import BUILD, Probe, Row, Workload, best_vector_bytes, measure
from report import comparisons, draw, fill_readme, processor, speedups, write_json


def measure_all(workloads: list[Callable[[], Workload]], threads: list[int], seconds: float) -> list[Row]:
    """`workloads` are functions that make one: its tensors live no longer than its measurement."""
    probe = Probe(best_vector_bytes())
    rows = []
    for make in workloads:
        work = make()
        for count in threads:
            torch.set_num_threads(count)
            row = measure(work, probe, seconds, least_pairs=3)
            rows.append(row)
            share = f"  {100 * row.of_peak:4.0f} % of {row.limit}" if row.of_peak > 0 else ""
            line = f"{row.name:52} {count} threads  {row.speedup:7.2f} x{share}"
            print(line, file=sys.stderr, flush=True)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter; under two minutes")
    parser.add_argument("--isa", help="the instruction set to measure (as ATTENTION_OPS_ISA)")
    parser.add_argument("--threads", type=int, nargs="+", help="one and all cores if not given; all with --quick")
    parser.add_argument("--seconds", type=float, help="for each case and thread count (3; 0.5 with --quick)")
    parser.add_argument("--filter", default="", help="only what has this text in its name")
    parser.add_argument("--out", type=pathlib.Path, default=BUILD, help="folder of the tables and the picture")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows as JSON to this file")
    parser.add_argument("--readme", action="store_true", help="also replace the table of README.md")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.isa:
        os.environ["ATTENTION_OPS_ISA"] = arguments.isa
    from cases import CASES, against_torch
    from comparisons import COMPARISONS

    import attention_ops

    chosen = [c for c in CASES if (c.quick or not arguments.quick) and arguments.filter in c.name]
    compared = [c for c in COMPARISONS if not arguments.quick and arguments.filter in c.name]
    if not chosen and not compared:
        sys.exit(f"bench: expected --filter a part of a case's name, got {arguments.filter!r}")
    cores = torch.get_num_threads()
    threads = arguments.threads or ([cores] if arguments.quick else sorted({1, cores}))
    seconds = arguments.seconds or (0.5 if arguments.quick else 3.0)
    rows = measure_all([lambda c=c: against_torch(c) for c in chosen], threads, seconds)
    own_rows = measure_all([c.workload for c in compared], threads[-1:], seconds)

    title = f"{processor()}, {cores} cores; torch {torch.__version__}; instruction set {attention_ops.isa()}."
    text = f"{title}\n\n{speedups(rows)}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    everything = text + ("\nOurs against ours:\n\n" + comparisons(own_rows) if own_rows else "")
    (arguments.out / "attention.md").write_text(everything, encoding="utf-8")
    print(everything)
    if rows:
        draw(rows, arguments.out / "attention.png")
    if arguments.json:
        write_json(title, {"rows": rows, "comparisons": own_rows}, arguments.json)
    if arguments.readme:
        fill_readme(text, pathlib.Path(__file__).resolve().parent.parent / "README.md")


if __name__ == "__main__":
    main()
