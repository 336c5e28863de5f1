# Everything a newcomer needs: `make demo` and `make test`. Both create .venv on first use.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types format clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: .venv/.installed
	@$(BIN)/python examples/untrained.py demo-out/untrained
	@$(BIN)/arpg plan --output demo-out/orders.png
	@$(BIN)/arpg generate --model demo-out/untrained --class 3 --class 7 --num 8 --seed 0 --output demo-out/untrained.png
	@echo "No trained model is in the box yet: demo-out/untrained.png is what random weights draw (noise)."
	@echo "demo-out/orders.png shows in which step each token is decoded, for every order."

test: .venv/.installed
	$(BIN)/pytest

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
