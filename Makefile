# The commands of the project: `make` lists them.

# pyproject.toml says which torch will do; its CPU build is enough. For another: TORCH="torch==2.14.*".
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv

# An active environment that already has torch is used as it is; otherwise everything goes into $(VENV).
# (Not a system Python that forbids pip to install into it.)
usable = import importlib.util as u, os, sys, sysconfig; \
	managed = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")); \
	sys.exit(u.find_spec("torch") is None or (managed and sys.prefix == sys.base_prefix))
PY ?= $(shell $(PYTHON) -c '$(usable)' 2>/dev/null && command -v $(PYTHON) || echo $(VENV)/bin/python)
PIP = $(PY) -m pip install --quiet --disable-pip-version-check

BUILD_NEEDS = numpy 'setuptools>=77' ninja
DEMO_NEEDS = tqdm matplotlib
TEST_NEEDS = $(DEMO_NEEDS) pytest pytest-xdist hypothesis cmake transformers x-transformers rotary-embedding-torch
LINT_NEEDS = ruff clang-format
CLANG_FORMAT = $(PY) -c 'from clang_format import clang_format as run; run()'

CORES := $(shell getconf _NPROCESSORS_ONLN)
export MAX_JOBS ?= $(CORES)
# A user's compiler may know warnings that ours does not; here a warning is an error.
export ATTENTION_OPS_WERROR := 1
# The package is built in place; scripts in other folders find it here.
export PYTHONPATH := $(CURDIR)

CPP = $(shell find csrc tests benchmarks examples -name '*.h' -o -name '*.cpp' -o -name '*.c' -o -name '*.cuh' -o -name '*.cu')

.PHONY: help demo test sanitize cross kernels mutate lint format bench build clean environment
.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

demo: build  ## train a small GPT on attention_ops and on torch, and compare (five minutes, once built)
	$(PIP) $(DEMO_NEEDS)
	$(PY) examples/train_gpt.py

# PYTEST='-x -k masks' and the like are added to pytest's command.
PYTEST =
test: build  ## run the linters and the whole test suite
	$(PIP) $(TEST_NEEDS)
	$(MAKE) lint
	$(PY) -m pytest -n $(CORES) -rs $(PYTEST) tests

lint: environment  ## check style and layout of Python and C++
	$(PIP) $(LINT_NEEDS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(if $(CPP),$(CLANG_FORMAT) --dry-run -Werror $(CPP))

format: environment  ## bring Python and C++ into the layout that lint checks
	$(PIP) $(LINT_NEEDS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CPP),$(CLANG_FORMAT) -i $(CPP))

sanitize:  ## run the CPU kernels under the address and undefined-behaviour sanitizers
	$(MAKE) -C tests/sanitize -j $(MAX_JOBS) run BUILD=$(CURDIR)/build/sanitize

cross:  ## run the CPU kernels for aarch64 (NEON) under an emulator; needs g++-aarch64-linux-gnu and qemu-user
	$(MAKE) -C tests/sanitize cross BUILD=$(CURDIR)/build/sanitize

kernels: environment  ## compile the CUDA kernels with nvcc for compute capability 8.0, and say what each takes
	$(PY) tests/nvcc.py

mutate: build  ## plant faults in the CUDA kernels, one at a time, and see that the tests find each (half an hour and more)
	$(PIP) $(TEST_NEEDS)
	$(PY) tests/gpu_model/mutate.py $(MUTATE)

bench: build  ## measure against torch; tables and a picture in build/benchmarks
	$(PIP) $(DEMO_NEEDS)
	$(PY) benchmarks/bench_attention.py $(BENCH)

build: environment  ## compile the operators in place (about ten minutes on two cores)
	$(PY) setup.py --quiet build_ext --inplace

environment: $(filter $(VENV)/bin/python,$(PY))
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)'
	@$(PIP) $(BUILD_NEEDS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:  ## remove what was built (not the environment)
	rm -rf build demo *.egg-info attention_ops/*.so attention_ops/_build.json
