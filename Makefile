# On a bare machine with Python >= 3.11, make and a C++ compiler, every target installs what it
# needs. pip's own variables (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) choose another torch build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MAKEFLAGS += --no-print-directory

.PHONY: venv run test test-slow lint bench format clean

run: venv
	$(BIN)/reconcile run

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed, this is %s" % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

test: venv
	$(BIN)/python -m pytest

test-slow: venv
	$(BIN)/python -m pytest tests -m slow

lint: venv
	@if ls kernels/__init__.py references/__init__.py reports/__init__.py fixtures/__init__.py tests/__init__.py 2>/dev/null; then echo 'these must not be packages: kernels is the import name of Hugging Face kernels'; exit 1; fi
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m pytest tests/bench --override-ini addopts='--import-mode=importlib --strict-markers -s' --benchmark-only

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venvs .reconcile .pytest_cache .mypy_cache .ruff_cache .benchmarks build dist
