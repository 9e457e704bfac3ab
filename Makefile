# make lab         JupyterLab on labs/00_start.ipynb
# make dashboard   the same notebooks as pages, without code (Voila)
# make test        the whole test suite but its slow part
# make test-slow   the slow part: load and soak tests
# make check       style, types and who may import whom
#
# Each makes .venv first if there is none, and installs again only when pyproject.toml or
# constraints.txt has changed. Variables, all optional:
#   PYTHON=python3.12   which Python makes .venv (3.11 or newer)
#   PORT=9000           where `make lab` and `make dashboard` serve (default: the first free one)
#   TORCH=cpu           PyTorch's CPU build, a tenth of the download, for a machine without a GPU
#   VENV=path           another place for .venv
#   JOBS=0              tests in one process, one after another (default: 2 at a time)
#   PYTEST_ARGS="-k x"  more words for pytest

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
            $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV ?= .venv
PORT ?=
TORCH ?=
JOBS ?= 2
PYTEST_ARGS ?=

bin := $(VENV)/bin
stamp := $(VENV)/.installed
pytest := $(bin)/python -m pytest -n $(JOBS) --dist loadfile
port := $(if $(PORT),--port $(PORT))
torch_index := $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: help lab dashboard test test-slow check clean install
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

lab: $(stamp)
	@exec $(bin)/gdlab lab $(port)

dashboard: $(stamp)
	@exec $(bin)/gdlab dashboard $(port)

test: $(stamp)
	$(pytest) $(PYTEST_ARGS)

test-slow: $(stamp)
	$(pytest) -m slow tests $(PYTEST_ARGS) || { code=$$?; test $$code -eq 5; }

check: $(stamp)
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/python -m pytest -q tests/test_layers.py

install: $(stamp)

$(stamp): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "gdlab needs Python 3.11 or newer: install one, or name it with PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV): this downloads PyTorch and Jupyter, and takes some minutes the first time."
	@test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@$(bin)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(torch_index) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
