# Everything a newcomer needs. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
TESTS := $(BIN)/python -m pytest

.PHONY: help setup demo check test test-slow kernels lint format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.venv/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedobp needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.dev: .venv/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@# The older of the two versions that the kernels support, to compile them with both. Triton exists for Linux only.
	[ "$$(uname)" != Linux ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv/triton-3.6 'triton==3.6.*'
	@touch $@

setup: .venv/.dev  ## make .venv with everything for development
	@echo "Ready. Run: . .venv/bin/activate"

demo: .venv/.base  ## compare FedOBP with its baselines on real handwritten digits
	$(BIN)/fedobp compare

check: lint  ## linters, types, layers and the essential tests: before every commit
	$(TESTS) -m essential

test: lint  ## everything: linters, types, layers, tests, the built wheel
	$(TESTS) --numprocesses auto --maxprocesses 4 --dist worksteal

test-slow: .venv/.dev  ## what takes minutes: the paper's CNN on real Fashion-MNIST (needs FEDOBP_DATA)
	$(TESTS) -m slow

kernels: .venv/.dev  ## compile every kernel in every tile shape for every card, with both versions of Triton: an hour
	$(BIN)/python tests/compile_kernels.py --all
	PYTHONPATH=.venv/triton-3.6 $(BIN)/python tests/compile_kernels.py --all

lint: .venv/.dev  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev  ## measure, as ratios to a baseline in the same run
	$(BIN)/python benchmarks/serial.py
	$(BIN)/python benchmarks/lanes.py
	$(BIN)/python benchmarks/data.py

clean:  ## remove what was made here, but for runs/
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
