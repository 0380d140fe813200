#!/usr/bin/env bash
# For the day a GPU is at hand: half an hour that builds for it, tests, looks for races and measures.
#
#   tools/gpu_check.sh [folder]      results go to the folder (build/gpu_check)
#   PY=python tools/gpu_check.sh     the interpreter, with a CUDA build of torch
#
# Every step leaves a log, and what it found as JSON or XML; one that fails does not stop the next. Without a GPU it is
# rehearsed: what needs none is done, and of the rest it is said what would be run.
set -u
cd "$(dirname "$0")/.."
PY=${PY:-python}
OUT=${1:-build/gpu_check}
mkdir -p "$OUT"
FAILED=0

has_gpu() { "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
if has_gpu; then GPU=1; else GPU=0; echo "no GPU: a rehearsal"; fi

# step NAME SECONDS COMMAND...: on a GPU; rehearsed, only its command is printed.
step() {
  local name=$1 seconds=$2
  shift 2
  if [ "$GPU" = 0 ]; then
    echo "$name, at most $seconds s: $*"
    return
  fi
  anywhere "$name" "$seconds" "$@"
}
# The same with or without one.
anywhere() {
  local name=$1 seconds=$2 began=$SECONDS
  shift 2
  timeout "$seconds" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  [ "$status" = 0 ] || FAILED=1
  echo "$name: exit $status after $((SECONDS - began)) s, see $OUT/$name.log"
}

CUDA_TESTS=$(ls tests/test_cuda*.py)

anywhere device 60 "$PY" -c 'import torch; print(torch.__version__, torch.version.cuda)
if torch.cuda.is_available(): print(torch.cuda.get_device_properties(0))'
if [ "$GPU" = 1 ]; then
  TORCH_CUDA_ARCH_LIST=$("$PY" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
  export TORCH_CUDA_ARCH_LIST
fi
export ATTENTION_OPS_ISAS=${ATTENTION_OPS_ISAS:-native}
anywhere build 600 "$PY" setup.py build_ext --inplace
anywhere build_info 60 "$PY" -c 'import json, attention_ops; print(json.dumps(attention_ops.build_info()))'
# shellcheck disable=SC2086
anywhere collect 120 "$PY" -m pytest -q --collect-only $CUDA_TESTS
# shellcheck disable=SC2086
step tests 420 "$PY" -m pytest -q -rs --junitxml "$OUT/tests.xml" -k "not model and not cpu" $CUDA_TESTS
for tool in memcheck racecheck synccheck initcheck; do
  # shellcheck disable=SC2086
  step "$tool" 90 compute-sanitizer --tool "$tool" --error-exitcode 1 "$PY" -m pytest -q -x tests/test_cuda.py -k "every_bias and not model and not cpu"
done
step bench 480 "$PY" benchmarks/bench_cuda.py --json "$OUT/bench.json"
step profile 240 ncu --set full --launch-count 8 --export "$OUT/profile" "$PY" benchmarks/bench_cuda.py --quick
exit $FAILED
