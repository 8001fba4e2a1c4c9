# Every target does its own set-up: on a machine with Python 3.11 or newer and make, any of them works alone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIN    := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check bench fix pins wheel clean

help:  ## what there is to make
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Anabranch needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements/build.txt requirements/runtime.txt pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes -r requirements/build.txt -r requirements/runtime.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

setup: $(VENV)/.dev  ## everything a developer needs, in .venv
	@echo "Ready: $(BIN)/anabranch --help"

demo: $(VENV)/.runtime  ## ask a question of three sources in the terminal, then serve on 127.0.0.1:8001
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev  ## the tests, real servers included
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadgroup

soak: $(VENV)/.dev  ## the long load and fault runs
	$(BIN)/python -m pytest -m soak

check: $(VENV)/.dev  ## style, types, and who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## our server, the floor and a classic server, side by side in one run
	$(BIN)/python -m benchmarks.chat

fix: $(VENV)/.dev  ## what can be put right automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pins: $(VENV)/.dev  ## newest versions into requirements/*.txt
	$(PIN) --upgrade pyproject.toml --output-file requirements/runtime.txt
	$(PIN) --upgrade requirements/build.in --output-file requirements/build.txt
	$(PIN) --upgrade requirements/dev.in pyproject.toml --output-file requirements/dev.txt

wheel: $(VENV)/.dev  ## a wheel in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
