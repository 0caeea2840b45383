# make quickstart   train a small model on real text (makes the environment first)
# make test         run the tests
# make lint         ruff and pyright
# Another interpreter or folder: make test PYTHON=python3.12 VENV=.venv312

VENV ?= .venv
# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

setup: $(STAMP)

# Python knows the packages by this file, so it is the only reason to install again.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; install it, or name it: make setup PYTHON=..." >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

quickstart: $(STAMP)
	$(BIN)/moejax train configs/quickstart.yaml

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
