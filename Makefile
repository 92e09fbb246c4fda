# Every target builds what it needs; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
EXTRAS := dev,hf,data,eval,plot,track
OLDEST := .venv-oldest

.PHONY: demo test test-slow test-oldest check format clean

# Threads that wait for each other sleep soon: where others work too, those that spin take all the time there is.
demo: $(READY)  ## train a small model in about two minutes, resume it, draw it, let it write
	GOMP_SPINCOUNT=1000 $(BIN)/gdn2 demo

test: $(READY)  ## all tests that fit in ten minutes on two cores: one thread each, or they wait for each other
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-slow: $(READY)  ## the long ones
	$(BIN)/pytest -m slow

test-oldest: $(OLDEST)/ready  ## with the oldest transformers that is supported
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest -n 2 tests/hf

check: $(READY)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST) *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

# No constraints: the pins belong to the newest transformers.
$(OLDEST)/ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --editable ".[$(EXTRAS)]" "transformers==5.17.*" "torch==2.13.0"
	touch $@
