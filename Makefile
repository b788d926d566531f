SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
RUN_DIR ?= runs/demo
# Test files at a time; two threads of one process would spin where another wants the core.
JOBS ?= 2
ARMS ?= main
SEEDS ?= 0,1,2
export PIVOTRL_SHARED ?= ../shared
# Out-of-domain questions for the demo, where that folder is there (elsewhere: make demo OOD=my_choices.jsonl).
OOD ?= $(wildcard $(PIVOTRL_SHARED)/data/ood/hellaswag_val_200.jsonl)
OOD_ALL ?= $(wildcard $(PIVOTRL_SHARED)/data/ood)

.PHONY: help install install-gpu install-dev demo test lint bench study results clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## the CPU engines and pivotrl into .venv (seconds when nothing changed)

$(VENV)/.installed: pyproject.toml requirements/cpu.txt
	@test -n "$(PYTHON)" || { echo "make install: needs Python 3.11 or 3.12; name it with PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q --no-deps -r requirements/cpu.txt
	$(BIN)/pip install -q -e '.[wandb]'
	@# CUDA torch brings triton; nothing here uses it, and a torchvision of another build breaks transformers.
	$(BIN)/pip uninstall -q -y triton torchvision torchaudio torchcodec 2>/dev/null || true
	@$(BIN)/python -c 'import torch, transformers' && touch $@

install-gpu: $(VENV)/.installed-gpu ## for NVIDIA GPUs: Python 3.12 and nvcc of CUDA 13 (or build the Dockerfile, which runs this)

$(VENV)/.packages-gpu: pyproject.toml requirements/gpu.txt
	python3.12 -m venv $(VENV)
	$(BIN)/pip install -q -c requirements/gpu.txt torch setuptools wheel ninja pybind11
	@# Transformer Engine's part for torch is compiled against the torch that is there.
	$(BIN)/pip install -q -c requirements/gpu.txt --no-build-isolation 'transformer-engine[pytorch,core-cu13]'
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; o = p["optional-dependencies"]; print(*p["dependencies"], *o["gpu"], *o["wandb"], *o["tensorboard"], sep="\n")' >$(VENV)/requirements.txt
	$(BIN)/pip install -q -c requirements/gpu.txt -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.installed-gpu: $(VENV)/.packages-gpu
	$(BIN)/pip install -q --no-deps -e .
	@touch $@

install-dev: $(VENV)/.installed-dev ## install, and the tools for tests and lint

$(VENV)/.installed-dev: $(VENV)/.installed requirements/tau2.txt
	$(BIN)/pip install -q -e '.[dev]'
	$(BIN)/pip install -q --no-deps -r requirements/tau2.txt
	@touch $@

demo: install ## the whole job on this CPU: trajectories -> pivots -> GRPO -> checkpoint and report (about 20 minutes)
	$(BIN)/pivotrl run experiment=demo run_dir=$(RUN_DIR) $(if $(OOD),evaluate.ood_path=$(OOD))

test: install-dev ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: install-dev ## style, types, import rules, shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@git ls-files '*.sh' .ci/run | xargs -r $(BIN)/shellcheck
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi

bench: install ## the short benchmarks, both sides in one run
	$(BIN)/python -m benchmarks

study: install ## the arms of experiments/ over three seeds, resumable (hours; make study SEEDS=0 ARMS=base,sft,adv,e2e)
	$(BIN)/python -m experiments.study --arms $(ARMS) --seeds $(SEEDS) $(if $(OOD_ALL),evaluate.ood_path=$(OOD_ALL))

results: ## docs/results.md and its figures from the recorded runs (seconds)
	$(BIN)/python -m experiments.results

clean: ## remove run directories and caches, not .venv
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
