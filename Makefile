# Two commands do everything on a machine with Python ≥ 3.11, make and a package index: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo nano compare arena results test lint format types pytest torture browser test-slow test-gpu verl-env test-verl vllm-env \
  test-vllm test-trl-oldest clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "r3 needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and pinned: a bare `torch` requirement may resolve to a build with gigabytes of CUDA packages
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet 'torch==2.13.0'
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

setup: $(READY) ## make .venv and install r3 into it

demo: $(READY) ## train the bundled model with R³ on two CPU cores (about a minute)
	$(BIN)/r3 train run.dir=runs/demo-$$(date +%Y%m%d-%H%M%S)

nano: $(READY) ## R³ in one file: train the bundled model with examples/nano_r3.py (two to three minutes)
	$(BIN)/python examples/nano_r3.py

compare: $(READY) ## six methods, five seeds, the bundled model: about half an hour on two CPU cores; go on with it by the same
	$(BIN)/r3 compare recipes/compare-embedded.yaml --seeds 5 --tokens 240000 --evaluations 5 --jobs 2

arena: $(READY) ## every method, two tasks, rates tuned for each, those with help in a table of their own; go on with it by the same
	$(BIN)/python -m tools.arena --jobs 2

results: $(READY) ## write docs/results.md, its pages and docs/pilots.md again from their raw files
	$(BIN)/python -m tools.make_results

test: lint types pytest ## set up, lint, type-check, run the tests

lint: $(READY) ## ruff: style and format; Markdown: one sentence per line
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.sentences

format: $(READY) ## let ruff and tools/sentences.py rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tools.sentences --fix

types: $(READY) ## mypy --strict on src/
	$(BIN)/mypy

pytest: $(READY) ## the tests alone
	$(BIN)/pytest -n 2

SEED ?= 0
SCALE ?= 1
torture: $(READY) ## seeded faults, far more than the tests try; prints a table of tried and held (SEED=0, SCALE=1)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture --seed $(SEED) --scale $(SCALE)

# verl pins other versions than ours of what both use: its tests have an environment of their own.
VERL := .venv-verl
VERL_NEEDS := tests/integrations/verl/requirements.txt

$(VERL)/.ready: $(VERL_NEEDS) pyproject.toml
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -c 'import torch' 2>/dev/null || $(VERL)/bin/pip install --quiet 'torch==2.13.0'
	$(VERL)/bin/pip install --quiet --no-deps -r $(VERL_NEEDS)
	$(VERL)/bin/pip install --quiet --no-deps -e .
	touch $@

verl-env: $(VERL)/.ready ## make .venv-verl, where the tests of the verl plugin run

test-verl: verl-env ## R³ in verl's own trainers, on a local Ray with verl's FSDP2 workers and recorded answers
	@# not our options: the libraries' warnings are theirs, and --ignore leaves just these tests out; the verifier's
	@# tests because here it runs with another antlr4. loadfile: the tests of a run of verl's are in one file
	$(VERL)/bin/python -m pytest -o addopts= -o filterwarnings=ignore -q -ra --durations=5 -n 2 --dist loadfile \
	  tests/integrations/verl tests/integrations/test_contract.py tests/verify/test_policy.py

# vLLM wants versions of its own of much that it shares with us, and its build for CPUs is another package.
VLLM := .venv-vllm
VLLM_NEEDS := tests/rollout/vllm/requirements.txt

$(VLLM)/.ready: $(VLLM_NEEDS) pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -c 'import torch' 2>/dev/null || $(VLLM)/bin/pip install --quiet 'torch==2.13.0'
	$(VLLM)/bin/pip install --quiet --no-deps -r $(VLLM_NEEDS)
	$(VLLM)/bin/pip install --quiet --no-deps -e .
	touch $@

vllm-env: $(VLLM)/.ready ## make .venv-vllm, where the tests of the vLLM engines and of vLLM inside TRL and verl run

test-vllm: vllm-env ## the real vLLM on a CPU: in the trainer's process, as two servers, and inside TRL's and verl's trainers
	@# not our options: the libraries' warnings are theirs, and --ignore leaves just these tests out
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -o addopts= -o filterwarnings=ignore -q -ra --durations=5 \
	  -n 2 --dist loadfile tests/rollout/vllm tests/integrations/test_trl_vllm.py tests/integrations/verl/test_vllm.py

# The oldest TRL that the adapter takes, before the newest, which .venv has.
TRL_OLDEST := .trl-oldest

$(TRL_OLDEST)/.ready: pyproject.toml $(READY)
	rm -rf $(TRL_OLDEST)
	$(BIN)/pip install --quiet --no-deps --target $(TRL_OLDEST) 'trl==1.14.2'
	touch $@

test-trl-oldest: $(TRL_OLDEST)/.ready ## the TRL adapter's tests with the oldest TRL that it takes
	PYTHONPATH=$(TRL_OLDEST) $(BIN)/pytest -n 2 tests/integrations/test_trl.py tests/integrations/test_contract.py

test-slow: $(READY) ## the tests that make test leaves out, since each takes half a minute: hogs in the sandbox, four processes, compiled shards
	$(BIN)/pytest -n 2 -m slow

test-gpu: ## the tests that need a CUDA card, with the Python that has torch for it (PYTHON=python3)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -p no:cacheprovider tests

browser: ## install Debian's Chromium where there is none and we are root: the tests of r3 view look with it
	@if [ -n "$$CHROMIUM" ] || command -v chromium || command -v chromium-browser || command -v google-chrome; then \
	  :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else \
	  echo "no Chromium: install one, or set CHROMIUM to its path; until then the browser tests are skipped" >&2; \
	fi

clean: ## remove .venv and caches
	rm -rf $(VENV) $(VERL) $(VLLM) $(TRL_OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
