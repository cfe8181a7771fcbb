# Two commands for a newcomer: make run, make test. Nothing else is needed on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled on first import: compiling torch and its dependencies takes as long as installing them.
INSTALL := $(BIN)/pip install --no-compile -qq --disable-pip-version-check -c constraints.txt
# One more than the number of cores: some tests wait for others.
TEST_PROCESSES ?= 3
TESTED := .[test,ocr,video,delta,duckdb,dask,ray,8bit,quantize,vlm,text,view,reward-server,docs]
TORCH := $(shell grep -om1 'torch>=[^"]*' pyproject.toml)
KILLS ?= 40
SEED ?= 0
export OMP_NUM_THREADS ?= 1
# Some machines disable bytecode; hundreds of processes would then compile all their imports again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: run check test test-all test-slow test-newest test-lowest chaos gpu install install-test lint typecheck format bench docs clean

run: install
	$(BIN)/flowmill run configs/digits_crd.yaml

PYTEST = $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup

# All checks that a change must pass; types are checked in parallel with the tests.
check: install-test
	$(MAKE) --jobs 2 --output-sync=line lint typecheck test-all

test-all: $(VENV)/.compiled
	$(PYTEST) -m "not campaign"

# Targets: tests without other processes; tests that start processes; kills and exhaustive shapes.
test: $(VENV)/.compiled
	$(PYTEST) -m "not slow and not campaign"

test-slow: install-test
	$(PYTEST) -m "slow and not campaign"

# A part of the tests that uses every library, with the newest and the lowest releases that pyproject.toml allows.
test-newest: export UV_RESOLUTION = highest
test-lowest: export UV_RESOLUTION = lowest-direct
test-lowest: TORCH := $(shell echo '$(TORCH)' | sed 's/>=\([^,]*\).*/==\1/')
test-newest test-lowest: test-%: .venv-%/.installed
	.venv-$*/bin/pytest -n $(TEST_PROCESSES) --dist loadgroup $$(.venv-$*/bin/python -m tests.support.libraries)

# pip takes the CPU build of torch where it finds one; the lowest release has one, and uv keeps it.
.venv-%/.installed: pyproject.toml
	rm -rf .venv-$*
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --no-compile -qq --disable-pip-version-check uv '$(TORCH)'
	.venv-$*/bin/uv pip install -q --python .venv-$*/bin/python -e '$(TESTED)'
	touch $@

chaos: install-test
	$(PYTEST) -m campaign
	$(BIN)/python -m tools.chaos.fuzz --seed $(SEED)
	$(BIN)/python -m tools.chaos.campaign --kills $(KILLS) --damages 500 --seed $(SEED)
	$(BIN)/python -m tools.chaos.campaign --kills $(KILLS) --seed $(SEED) --tend

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(VENV)/bin/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)

# Installed separately, torch comes from a local or CPU index if there is one, instead of the newest CUDA build.
$(VENV)/.torch: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	touch $@

# The first run would compile these on one core. Torch is compiled while pip installs the rest, then one part per core.
$(VENV)/.installed: $(VENV)/.torch
	$(BIN)/python -c 'import torch._dynamo, torch.distributed.checkpoint' >/dev/null 2>&1 & $(INSTALL) -e . && wait
	$(BIN)/python -c 'import prefect.server.api.server' & $(BIN)/python -c 'import diffusers, mlflow, peft, transformers.models.clip'; wait
	touch $@

# uv installs the test dependencies in a tenth of pip's time. It ignores the indexes of pip's settings: pip is the fallback.
$(VENV)/.installed-test: $(VENV)/.torch
	$(INSTALL) uv && $(BIN)/uv pip install -q --no-cache --python $(BIN)/python -c constraints.txt -e '$(TESTED)' \
	  || $(INSTALL) -e '$(TESTED)'
	touch $(VENV)/.installed $@

# Compiled by one process; concurrent ones would each compile everything.
$(VENV)/.compiled: $(VENV)/.installed-test
	$(BIN)/python -c 'from tests.support.preloaded import import_all; import_all()'
	touch $@

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: install-test
	$(BIN)/mypy

# The checks before a first run on a GPU, in ten minutes.
gpu: install-test
	$(BIN)/python -m tools.gpu --json gpu.json

bench: install-test
	$(BIN)/python -m tools.benchmarks --write $(BENCH)

docs: install-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-newest .venv-lowest build *.egg-info
