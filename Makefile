# Two commands for a newcomer: make run, make test. Nothing else is needed on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
TEST_PROCESSES ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: run test install install-test lint typecheck format bench clean

run: install
	$(BIN)/flowmill run configs/digits.yaml

test: install-test
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first: on its own it is taken from a local or CPU index if there is one, instead of the newest CUDA build.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(INSTALL) -e '.[test,ocr,s3,video,delta,dask,ray,8bit,vlm]'
	touch $@

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: install-test
	$(BIN)/mypy

bench: install-test
	$(BIN)/python -m tests.benchmarks

clean:
	rm -rf $(VENV) build *.egg-info
