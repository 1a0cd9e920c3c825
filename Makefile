# Everything a person types. A fresh machine needs Python >= 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint types

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group dev
	touch .venv/ready

test: .venv/ready  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: .venv/ready  ## ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/ready  ## pyright
	$(BIN)/pyright
