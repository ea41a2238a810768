# Every target that needs the environment makes it first: see tools/bootstrap.py.
#   PYTHON=...          the Python >= 3.8 that runs the bootstrap (default python3)
#   NORMPLUGIN_ENV=...  the environment's folder (default .venv)
#   ENV_PYTHON=...      use this interpreter as it is and install nothing
#   ARGS=...            further arguments of the command
#   PYTEST_ARGS=...     how pytest runs (default: two processes, one file at a time each)

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist loadfile
CHECKED := $(wildcard setup.py normplugin tests tools benchmarks examples)

ifdef ENV_PYTHON
BOOTSTRAP := true
else
ENV_PYTHON := $(or $(patsubst ~/%,$(HOME)/%,$(NORMPLUGIN_ENV)),.venv)/bin/python
BOOTSTRAP := $(PYTHON) tools/bootstrap.py
endif

# This checkout wins over an editable install of another one, in child processes too.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help env test compare lint format bench doctor clean

help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 16
	@sed -nE 's/^#   ([A-Z_]+=)/  \1/p' Makefile

env: ## make the environment, or do nothing when it is up to date
	@$(BOOTSTRAP)

test: env ## run the whole test suite (ARGS=tests/core for a part)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 "$(ENV_PYTHON)" -m pytest $(PYTEST_ARGS) $(ARGS)

compare: env ## train NormFormer, Peri-LN and the baselines, and write out/compare
	"$(ENV_PYTHON)" -m normplugin compare --out out/compare $(ARGS)

lint: env ## ruff and mypy, as CI runs them
	"$(ENV_PYTHON)" -m ruff check $(CHECKED)
	"$(ENV_PYTHON)" -m ruff format --check $(CHECKED)
	"$(ENV_PYTHON)" -m mypy

format: env ## let ruff repair and format the sources
	"$(ENV_PYTHON)" -m ruff check --fix $(CHECKED)
	"$(ENV_PYTHON)" -m ruff format $(CHECKED)

bench: env ## run the benchmarks (ARGS=--help)
	"$(ENV_PYTHON)" -m benchmarks $(ARGS)

doctor: env ## say what is installed and what works
	"$(ENV_PYTHON)" -m normplugin doctor $(ARGS)

clean: ## delete caches, build products and out/ (the environment stays)
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
