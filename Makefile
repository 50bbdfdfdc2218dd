# Two commands for a fresh machine: `make quickstart` and `make test`. Everything else is listed by `make help`.

PYTHON ?= python3.11
# `make lock-cuda` resolves for both versions of Python.
PYTHON312 ?= python3.12
VENV ?= .venv
# Where your package index lacks the CPU build of torch, name PyTorch's CPU index: make quickstart TORCH_INDEX=...
TORCH_INDEX ?=

LOCK := requirements/cpu.lock.txt
INSTALLED := $(VENV)/.installed
PY := $(VENV)/bin/python
PIP = $(PY) -m pip -qq --disable-pip-version-check --log $(VENV)/install.log
INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# The path of the caller: `gpu` runs in the environment in use.
CALLER_PATH := $(PATH)
# ninja, which builds DeepSpeed's op, is found by its name.
export PATH := $(abspath $(VENV))/bin:$(PATH)
# SHUFFLE=1 runs tests in a random order that the seed 1 gives.
PYTEST = $(PY) -m pytest $(if $(SHUFFLE),--random-order --random-order-seed=$(SHUFFLE)) \
	--numprocesses $(FILES) --dist loadfile
# Files of tests that run at a time. A third file saves no time on two cores, and three need more than 24 GB.
FILES = 2
# Makes targets one after the other and prints the time of all.
TIMED = start=$$(date +%s); $(MAKE) --no-print-directory $(1) && \
	echo "make $@ took $$(( ($$(date +%s) - start) / 60 )) min $$(( ($$(date +%s) - start) % 60 )) s"
# Built ops belong to this environment: the default folder is shared by every environment of the user.
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
# The environment has a torch for CPUs, and `placement.device=auto` would choose a GPU. An empty value hides all GPUs.
unit integration extended core all-tiers campaign soak: export CUDA_VISIBLE_DEVICES =
# Two files run at a time, so a second thread of a test would take a core from the other file.
unit integration extended core all-tiers: export OMP_NUM_THREADS = 1
# Without byte code on disk each of a run's processes compiles some 10,000 files at its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all lint format typecheck unit integration extended core all-tiers campaign soak coverage gpu docs lock lock-cuda clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv and install everything, once per change of the lock or pyproject.toml

$(INSTALLED): $(LOCK) pyproject.toml
	@sh requirements/check_system.sh "$(PYTHON)"
	@echo "Installing into $(VENV), 3 to 5 minutes (log: $(VENV)/install.log)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@echo 'export TORCH_EXTENSIONS_DIR="$$VIRTUAL_ENV/torch_extensions"' >> "$(VENV)/bin/activate"
	@grep '^pip==' $(LOCK) | $(PIP) install -r /dev/stdin
	@grep '^torch==' $(LOCK) | $(PIP) install --no-compile --no-deps $(INDEX) -r /dev/stdin || { \
		echo "If no torch build was found, name PyTorch's CPU index with TORCH_INDEX=... ."; exit 1; }
	@grep -v '^torch==' $(LOCK) | $(PIP) install --no-compile --no-deps --require-hashes --build-constraint $(LOCK) -r /dev/stdin
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@echo "Building DeepSpeed's op and importing every heavy library once"
	@$(PY) requirements/prepare.py > $(VENV)/prepare.log 2>&1 || { tail -n 30 $(VENV)/prepare.log; exit 1; }
	@touch $@

quickstart: $(INSTALLED)  ## train a tiny model by reinforcement learning on this machine, without a GPU
	$(PY) -m rl_plugins.recipes.quickstart $(if $(SEED),seed=$(SEED))
	@echo "in a shell     . $(VENV)/bin/activate"

test: export TEST_TIME_MARGIN = 3
test: $(INSTALLED)  ## what every change must pass: lint, types, unit tests and the core of the integration tests
	@$(call TIMED,lint typecheck core)

test-all: export TEST_TIME_MARGIN = 1
test-all: $(INSTALLED)  ## everything that needs no GPU, before anything is called done: `make test` and the extended tests
	@$(call TIMED,lint typecheck all-tiers)

lint: $(INSTALLED)  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(INSTALLED)  ## let ruff mend and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(INSTALLED)  ## mypy on the package, tests, benchmarks, docs and examples
	@# A worker of mypy that does not start within 3 seconds ends mypy with status 2; one process needs no worker.
	$(PY) -m mypy --num-workers 2 || { [ $$? -eq 2 ] && $(PY) -m mypy; }

unit: $(INSTALLED)  ## unit tests
	$(PYTEST) rl_plugins/tests -m "unit and not extended"

integration: $(INSTALLED)  ## the core of the integration tests, over Ray, DeepSpeed, vLLM and MLflow
	$(PYTEST) integration_tests -m "integration and not extended and not gpu"

extended: $(INSTALLED)  ## kills and resumes of every kind, typed docs pages, pipelines, many machines: over the same stack
	$(PYTEST) -m "extended and not gpu"

# One run of pytest starts and collects once, and the tiers share Ray, the engines and the servers of commands.
core: $(INSTALLED)
	$(PYTEST) -m "not extended and not gpu"

all-tiers: $(INSTALLED)
	$(PYTEST) -m "not gpu"

campaign: $(INSTALLED)  ## hours: kill -9 of each kind of process, TIMES=20 times each; goes on where it was stopped
	$(PY) -m integration_tests.campaign --page docs/kills.md $(if $(TIMES),--times $(TIMES)) $(if $(KINDS),--kinds $(KINDS))

soak: $(INSTALLED)  ## a run of STEPS=2000 steps: growth of memory, descriptors, temporary files and step time
	$(PY) -m benchmarks.soak $(if $(STEPS),--steps $(STEPS)) --out benchmarks/results/soak.md

coverage: $(INSTALLED)  ## line coverage of the library by `make test`; with ALL=1 by `make test-all`
	sh requirements/coverage.sh $(if $(ALL),all-tiers,core)

gpu: export PATH := $(CALLER_PATH)
gpu: export TORCH_EXTENSIONS_DIR = $(shell PATH="$(CALLER_PATH)" python -c 'import sys; print(sys.prefix)')/torch_extensions
gpu:  ## the tests that need a GPU, in the environment of the `python` in use (docs/gpus.md says how to install)
	@python requirements/check_gpu.py
	python -m integration_tests.gpu.without_vllm
	python -m pytest -m gpu --timeout 1800

docs: $(INSTALLED)  ## install if needed, then build the documentation site into site/ (the site needs no network)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "site/index.html; with its search: $(PY) -m http.server --directory site"

lock: $(INSTALLED)  ## resolve pyproject.toml again into the lock, keeping the pins that fit (UPGRADE=1: newest versions)
	$(PY) requirements/lock.py $(INDEX) $(if $(UPGRADE),--upgrade)

lock-cuda: $(INSTALLED)  ## the same for GPUs, into requirements/cuda.lock.txt (needs Python 3.12 as well: PYTHON312=...)
	$(PY) requirements/lock.py --lock cuda --python "$(PYTHON)" --python "$(PYTHON312)" $(if $(UPGRADE),--upgrade)

clean:  ## remove the environment, build products and caches
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
