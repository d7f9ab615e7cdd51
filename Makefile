# Two commands do everything on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= builtin-14m
TRACE ?=
FUZZ_SECONDS ?= 30
export OMP_NUM_THREADS ?= 1
# Tests start a hundred processes, each of which can read what the first has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo lab test histories check e2e fuzz gpu generate clean

help:  ## What can be made
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## A virtual environment with everything, in .venv

# torch goes first and pinned: whatever would pull it in later is then satisfied by this build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[server,dashboards,dev]'
	touch $(STAMP)

demo: $(STAMP)  ## Server, sidecar, replay, one stall, one buffer, and the diagnosis (MODEL=smollm2 TRACE=file.csv)
	$(BIN)/python -m sloscope.demo --model $(MODEL) $(if $(TRACE),--trace $(TRACE))

lab: $(STAMP)  ## The eight requests of the lab
	$(BIN)/sloscope lab

test: $(STAMP)  ## The fast tests, under five minutes on two cores
	$(BIN)/python -m pytest -q -m 'not e2e and not gpu' -n 2 --dist loadfile

histories: $(STAMP)  ## The scheduler alone, through SLOSCOPE_HISTORIES random histories
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/simulation

check: $(STAMP)  ## Format, lint, types, import rules, generated files, then the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/sloscope dashboards check
	$(BIN)/sloscope rules check
	$(BIN)/python -m queries.reference --check
	$(MAKE) test

e2e: $(STAMP)  ## Real processes: Prometheus, nginx, kill -9, a server that is not ours (needs Debian's prometheus, nginx, chromium, faketime)
	$(BIN)/python -m pytest -q -s -m e2e

fuzz: $(STAMP)  ## Coverage-guided fuzzing of what reads foreign bytes, FUZZ_SECONDS per target (installs atheris)
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check 'atheris>=3,<4'
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

gpu: $(STAMP)  ## On a machine with a CUDA device: its tests, then decode steps against the bytes that they must move
	$(BIN)/python -m benchmarks.gpu_roofline

generate: $(STAMP)  ## Rebuild the committed dashboards, rules and reference pages
	$(BIN)/sloscope dashboards build
	$(BIN)/sloscope rules build
	$(BIN)/python -m queries.reference

clean:  ## Everything that can be made again
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo *.egg-info
