"""Plants one fault after another in a copy of the CUDA kernels, and asks the tests of the model to find each.

    python tests/gpu_model/mutate.py            all of them
    python tests/gpu_model/mutate.py keys       those whose name has the word

It is how one knows that the tests would notice. A fault that survives makes the exit status 1. The copy lies in
build/mutate, with the model as it is built; what a fault touches is built again.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COPY = ROOT / "build" / "mutate"
MODEL = COPY / "build" / f"gpu_model-{torch.__version__}"
PARTS = ("csrc", "tests", "attention_ops")


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # in csrc
    old: str  # stands in the file once
    new: str
    tests: str  # as pytest's -k
    suite: str = "test_cuda.py"


FORWARD, KEYS, QUERIES = (f"kernels/cuda/tensor_{name}.cuh" for name in ("forward", "keys", "queries"))
SIMT, SIMT_BACK = "kernels/cuda/simt_forward.cuh", "kernels/cuda/simt_backward.cuh"
HALVES = "test_widths_of_half_types and cuda-model"
SCHEDULES = "test_any_schedule"
MUTATIONS = (
    Mutation(
        "forward: no barrier in the loop",
        FORWARD,
        "    device::sync_threads();\n",
        "",
        SCHEDULES,
    ),
    Mutation(
        "forward: no wait for copies",
        FORWARD,
        "    device::wait_for_copies();\n",
        "",
        SCHEDULES,
    ),
    Mutation(
        "forward: prefetch to the same stage",
        FORWARD,
        "fetch(walk.tile(), stage ^ 1)",
        "fetch(walk.tile(), stage)",
        SCHEDULES,
    ),
    Mutation(
        "forward: lse past the last row",
        FORWARD,
        "if (t.lane % 4 == 0 && i < site.of.queries)",
        "if (t.lane % 4 == 0 && i <= site.of.queries)",
        HALVES,
    ),
    Mutation(
        "forward: the mask does not hide",
        FORWARD,
        "s[m][c][e] = -kInfinity<float>;",
        "s[m][c][e] = -1;",
        HALVES,
    ),
    Mutation(
        "forward: old sums are not scaled",
        FORWARD,
        "l[h] = l[h] * alpha + sum;",
        "l[h] = l[h] + sum;",
        HALVES,
    ),
    Mutation(
        "forward: the maximum of one half of a row",
        FORWARD,
        "top = fmaxf(top, device::shuffle_xor(top, 2));",
        "",
        HALVES,
    ),
    Mutation(
        "forward: dropout is not scaled up",
        FORWARD,
        "l == 0 ? 0 : kept / l",
        "l == 0 ? 0 : 1 / l",
        "test_values_and_gradients and cuda-model",
    ),
    Mutation(
        "forward: no flag for what is not finite",
        FORWARD,
        "if (inexact && (tile.some || p.adds()))",
        "if (false)",
        "test_what_stands_at_a_hidden_place and cuda-model",
    ),
    Mutation(
        "keys: no barrier in the loop",
        KEYS,
        "    device::wait_for_copies();\n    device::sync_threads();\n",
        "    device::wait_for_copies();\n",
        SCHEDULES,
    ),
    Mutation(
        "keys: the values of one row too many",
        KEYS,
        "query + i < site.of.queries ?",
        "query + i <= site.of.queries ?",
        HALVES,
    ),
    Mutation(
        "keys: one head of a group",
        KEYS,
        "VisibleTiles walk(int(p.group()) * row_tiles,",
        "VisibleTiles walk(row_tiles,",
        HALVES,
    ),
    Mutation(
        "keys: dk is not scaled",
        KEYS,
        "dk, float(p.scale),",
        "dk, 1,",
        HALVES,
    ),
    Mutation(
        "keys: delta of the row before",
        KEYS,
        "memory.row_values[(2 * stage + 1) * S::kStep + query]",
        "memory.row_values[(2 * stage + 1) * S::kStep + (query ^ 1)]",
        HALVES,
    ),
    Mutation(
        "queries: no wait for copies",
        QUERIES,
        "    device::wait_for_copies();\n",
        "",
        SCHEDULES,
    ),
    Mutation(
        "queries: rows of the next warp",
        QUERIES,
        "q = left_operand<kWidth>(memory.own[0], warp_row, t.lane);",
        "q = left_operand<kWidth>(memory.own[0], warp_row ^ 16, t.lane);",
        HALVES,
    ),
    Mutation(
        "queries: row values are not bounded",
        QUERIES,
        "i < site.of.queries ? device::load",
        "true ? device::load",
        HALVES,
    ),
    Mutation(
        "plain forward: the sink is counted sixteen times",
        SIMT,
        "SimtThread().tx == 0 && sink",
        "sink",
        "test_values_and_gradients and cuda-model",
    ),
    Mutation(
        "plain forward: dropout before the sum",
        SIMT,
        "kept ? tile.s[r][c] : T(0)",
        "tile.s[r][c]",
        "test_dropout_is_that_of_the_formula and cuda-model",
    ),
    Mutation(
        "plain forward: every part writes lse",
        SIMT,
        "if (part > 0 || t.tx > 0 ||",
        "if (t.tx > 0 ||",
        "test_values_and_gradients and cuda-model",
    ),
    Mutation(
        "plain backward: delta of hidden rows",
        SIMT_BACK,
        "query < problem.queries ? row_value<T>(in.delta",
        "true ? row_value<T>(in.delta",
        "test_values_and_gradients and cuda-model",
    ),
    Mutation(
        "bias: lines are summed before they are there",
        "kernels/cuda/simt_bias.cuh",
        "  put_weights(m, x);\n  device::sync_threads();\n",
        "  put_weights(m, x);\n",
        "test_every_bias and cuda-model",
    ),
    Mutation(
        "decode: a tile before the last one's readers are done",
        "kernels/cuda/simt_decode.cuh",
        "      device::sync_threads();  // the last tile's readers are done\n",
        "",
        SCHEDULES,
        "test_cuda_decode.py",
    ),
    Mutation(
        "decode: chunks whatever their maxima",
        "kernels/cuda/simt_decode.cuh",
        "return from == base ? T(1) : device::exp2(from - base);",
        "return T(1);",
        "test_edges_of_chunks and cuda-model",
        "test_cuda_decode.py",
    ),
    Mutation(
        "distance: diagonals from the main one on alone",
        "kernels/cuda/simt_distance.cuh",
        "return Cell{n, own + n - skipped};",
        "return Cell{n, own + n};",
        "test_values_and_gradients and cuda-model",
        "test_cuda_distance.py",
    ),
    Mutation(
        "tangents: out moves by its weights alone",
        "kernels/cuda/simt_jvp.cuh",
        "out_dot[r][c] - sum * out.get<T>(row, column)",
        "out_dot[r][c]",
        "test_small and cuda-model",
        "test_cuda_derivatives.py",
    ),
    Mutation(
        "second derivatives: the softcap bends the other way",
        "kernels/cuda/simt_second.cuh",
        "T(-2) * tile.tanh",
        "T(2) * tile.tanh",
        "test_every_mask and cuda-model",
        "test_cuda_derivatives.py",
    ),
    Mutation(
        "summaries: the largest weight with another's key",
        "kernels/cuda/simt_weights.cuh",
        "device::shuffle_xor(largest[r].key, n)",
        "largest[r].key",
        "test_sizes and cuda-model",
        "test_cuda_weights.py",
    ),
    Mutation(
        "rope: the gradient turns forward",
        "kernels/cuda/simt_rope.cuh",
        "p.inverse ? -device::load(sines + i)",
        "p.inverse ? device::load(sines + i)",
        "test_the_gradient_turns_back and cuda-model",
        "test_cuda_rope.py",
    ),
    Mutation(
        "rope: sines without the factor",
        "kernels/cuda/simt_rope.cuh",
        "T(turn.sine * p.factor)",
        "T(turn.sine)",
        "test_axes_and_a_factor and cuda-model",
        "test_cuda_rope.py",
    ),
)


def copy() -> None:
    """The sources and what is built of them, with their times, so that only what a fault touches is built again."""
    shutil.rmtree(COPY, ignore_errors=True)
    for part in PARTS:
        shutil.copytree(ROOT / part, COPY / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", COPY)
    built = ROOT / MODEL.relative_to(COPY)
    if built.exists():
        shutil.copytree(built, MODEL)
    for headers in MODEL.rglob("*.d"):  # which objects depend on them
        headers.write_text(headers.read_text().replace(str(built), str(MODEL)))


def build() -> str:
    """What the compiler has against the model, or nothing."""
    command = ["make", "-s", f"-j{os.environ.get('MAX_JOBS', '2')}", "-C", COPY / "tests" / "gpu_model"]
    done = subprocess.run([*command, f"BUILD={MODEL}", f"PY={sys.executable}"], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def tests_pass(suite: str, selection: str) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"tests/{suite}",
        "-k",
        selection,
    ]
    environment = {**os.environ, "PYTHONPATH": str(COPY)}
    done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True)
    if done.returncode > 1:  # neither passed nor failed
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 0


def planted(mutation: Mutation) -> str:
    """The verdict of the tests on one fault."""
    path = COPY / "csrc" / mutation.file
    text, times = path.read_text(), path.stat()
    if text.count(mutation.old) != 1:
        return "NOT APPLIED"
    kept = COPY / "kept"
    shutil.copytree(MODEL, kept, dirs_exist_ok=True)
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        if build():
            return "NOT BUILT"
        return "SURVIVED" if tests_pass(mutation.suite, mutation.tests) else "found"
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(MODEL)
        kept.rename(MODEL)


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [mutation for mutation in MUTATIONS if word in mutation.name]
    copy()
    if complaint := build():
        sys.exit(complaint)
    for suite, selection in sorted({(mutation.suite, mutation.tests) for mutation in chosen}):
        if not tests_pass(suite, selection):
            sys.exit(f"expected tests to pass before a fault is planted, but of `{selection}` in {suite} some fail")
    failed = 0
    for mutation in chosen:
        began = time.monotonic()
        verdict = planted(mutation)
        failed += verdict != "found"
        print(f"{verdict:12}{mutation.name:50}{mutation.file:36}{time.monotonic() - began:5.0f} s", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} found")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
