# Two commands for a fresh machine: `make quickstart` and `make test`. Everything else is listed by `make help`.

PYTHON ?= python3.11
VENV ?= .venv
# Where your package index lacks the CPU build of torch, name PyTorch's CPU index: make quickstart TORCH_INDEX=...
TORCH_INDEX ?=

LOCK := requirements/cpu.lock.txt
INSTALLED := $(VENV)/.installed
PY := $(VENV)/bin/python
PIP = $(PY) -m pip -qq --disable-pip-version-check --log $(VENV)/install.log
INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# ninja, which builds DeepSpeed's op, is found by its name.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Built ops belong to this environment: the default folder is shared by every environment of the user.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
# Without byte code on disk each of a run's processes compiles some 10,000 files at its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format typecheck unit integration outages gpu docs lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv and install everything, once per change of the lock or pyproject.toml

$(INSTALLED): $(LOCK) pyproject.toml
	@sh requirements/check_system.sh "$(PYTHON)"
	@echo "Installing into $(VENV), 3 to 5 minutes (log: $(VENV)/install.log)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@echo 'export TORCH_EXTENSIONS_DIR="$$VIRTUAL_ENV/torch_extensions"' >> "$(VENV)/bin/activate"
	@$(PIP) install $$(grep '^pip==' $(LOCK))
	@$(PIP) install --no-compile --no-deps --build-constraint $(LOCK) $(INDEX) -r $(LOCK) || { \
		echo "If no torch build was found, name PyTorch's CPU index with TORCH_INDEX=... ."; exit 1; }
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@echo "Building DeepSpeed's op and importing every heavy library once"
	@$(PY) requirements/prepare.py > $(VENV)/prepare.log 2>&1 || { tail -n 30 $(VENV)/prepare.log; exit 1; }
	@touch $@

quickstart: $(INSTALLED)  ## train a tiny model by reinforcement learning on this machine, without a GPU
	$(PY) -m rl_plugins.recipes.quickstart $(if $(SEED),seed=$(SEED))
	@echo "in a shell     . $(VENV)/bin/activate"

test: lint typecheck unit integration  ## everything that needs no GPU: lint, types, unit and integration tests

lint: $(INSTALLED)  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(INSTALLED)  ## let ruff mend and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(INSTALLED)  ## mypy on the package, tests, benchmarks, docs and examples
	$(PY) -m mypy

unit: $(INSTALLED)  ## unit tests, two files at a time
	OMP_NUM_THREADS=1 $(PY) -m pytest -m unit --timeout 300 --numprocesses 2 --dist loadfile

integration: $(INSTALLED)  ## integration tests over Ray, DeepSpeed, vLLM and MLflow
	$(PY) -m pytest -m "integration and not gpu" --timeout 600

outages: $(INSTALLED)  ## engines, machines, servers and runs that are lost, hang or come back, over the same stack
	$(PY) -m pytest -m "outage and not gpu" --timeout 600 --exitfirst

gpu:  ## the tests that need a GPU, in the environment of the `python` in use (install: pip install -e '.[gpu,dev]')
	python -c "import torch; assert torch.cuda.is_available(), 'no CUDA device is visible'"
	python -m pytest -m gpu --timeout 1800

docs: $(INSTALLED)  ## build the documentation site into site/ (needs no network)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "site/index.html; with its search: $(PY) -m http.server --directory site"

lock: $(INSTALLED)  ## resolve pyproject.toml anew into the lock, keeping the pins that fit (UPGRADE=1: newest versions)
	$(PY) requirements/lock.py $(INDEX) $(if $(UPGRADE),--upgrade)

clean:  ## remove the environment, build products and caches
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
