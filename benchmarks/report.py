"""What becomes of measured rows: tables in Markdown, a picture, JSON, and the README's table."""

import dataclasses
import json
import pathlib
import platform
import sys
from collections.abc import Iterable

from harness import Row


def speedups(rows: Iterable[Row]) -> str:
    """Ours against torch; the parts of the peak where any is known."""
    rows = list(rows)
    of_peak = any(r.of_peak > 0 for r in rows)
    columns = ["case", "threads", "speed-up (quartiles)", *["ours, of peak", "torch, of peak"] * of_peak]
    columns += ["ours ms", "torch ms"]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for r in rows:
        peaks = [f"{100 * part:.0f} % {r.limit}" if part > 0 else "" for part in (r.of_peak, r.peer_of_peak)]
        parts = f" {peaks[0]} | {peaks[1]} |" * of_peak
        ratio = f"**{r.speedup:.2f}** ({r.low:.2f}–{r.high:.2f})"
        lines.append(f"| {r.name} | {r.threads} | {ratio} |{parts} {r.ours_ms:.3g} | {r.peer_ms:.3g} |")
    return "\n".join(lines) + "\n"


def comparisons(rows: Iterable[Row]) -> str:
    """Runs of ours against each other."""
    lines = ["| what | threads | ratio (quartiles) | first ms | second ms |", "|---|---:|---:|---:|---:|"]
    for r in rows:
        times = f"{r.peer_ms:.3g} | {r.ours_ms:.3g}"
        lines.append(f"| {r.name} | {r.threads} | **{r.speedup:.2f}** ({r.low:.2f}–{r.high:.2f}) | {times} |")
    return "\n".join(lines) + "\n"


def processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Bars of the speed-ups on a logarithmic axis; whiskers are the quartiles."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(9, 1.2 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{r.name} · {r.threads} thread{'s' * (r.threads > 1)}" for r in rows]
    whiskers = [[r.speedup - r.low for r in rows], [r.high - r.speedup for r in rows]]
    colours = ["tab:green" if r.speedup >= 1 else "tab:red" for r in rows]
    axes.barh(names, [r.speedup for r in rows], xerr=whiskers, color=colours, ecolor="grey")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    for formatted in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatted(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("times as fast as torch")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)


def write_json(title: str, tables: dict[str, list[Row]], path: pathlib.Path) -> None:
    tables_as_dicts = {name: [dataclasses.asdict(row) for row in rows] for name, rows in tables.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"title": title, **tables_as_dicts}, indent=1) + "\n", encoding="utf-8")


def fill_readme(text: str, path: pathlib.Path, block: str = "bench") -> None:
    """Put `text` between the two markers of a block of the README."""
    begin, end = f"<!-- {block}:begin -->", f"<!-- {block}:end -->"
    readme = path.read_text(encoding="utf-8")
    if begin not in readme or end not in readme:
        sys.exit(f"bench: expected {path.name} to hold the markers {begin} and {end}")
    before, after = readme.split(begin)[0], readme.split(end)[1]
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")
