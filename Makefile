# make train    sets up everything, trains the default model, shows what it learned
# make test     sets up everything, runs style, types and tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(shell cksum < requirements.txt | cut -d' ' -f1)

.PHONY: help setup train test test-huggingface lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## create .venv and install requirements.txt (nothing to do when it is already there)

# torch first and alone: where the index offers a CPU build, nothing after it pulls CUDA. DeepSpeed is a pure build.
$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@echo "installing requirements.txt into $(VENV): about 2 GB, two minutes on a fast network"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@rm -f $(VENV)/.installed-*; touch $@

train: setup  ## train the default model on this machine (about 5 minutes on 2 cores) and show what it learned
	$(BIN)/python train.py

test: setup lint  ## style, types and the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-huggingface: setup  ## exports in environments with only torch and transformers (built once, 3 GB in ~/.cache/metalion)
	$(BIN)/python tests/hf/environments.py
	OMP_NUM_THREADS=1 METALION_COMPILE=1 $(BIN)/python -m pytest tests/hf/test_environments.py

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
