# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp')
INSTALLED := .venv/.installed

# The peers of bench/radix: a wheel whose core is compiled for Python 3.11, so they have an environment of their own.
PEER_PYTHON ?= python3.11
PEERS := build/peers
SGLANG := sglang-0.5.23
VLLM := vllm-0.32.0

# A test run: its workers, and the hypothesis profile of `make test-long` (tests/conftest.py).
WORKERS := -n auto --dist loadgroup --max-worker-restart 0
PROFILE ?= long

.PHONY: help run demo test test-long test-gpu check format bench bench-peers plots models clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(INSTALLED) ## the main job: a small real model, fetched once, and what the cache saves it
	@$(BIN)/pagoda demo

demo: $(INSTALLED) ## tours that need no model: the pool, and the tree that finds what is computed
	@$(BIN)/pagoda demo pool
	@$(BIN)/pagoda demo tree

test: $(INSTALLED) ## the fast tests, the same in each run; those that need a GPU are not collected
	$(BIN)/python -m pytest $(WORKERS)

test-long: $(INSTALLED) ## sanitisers, mutations, costs, and all of hypothesis with more examples; PROFILE=nightly: random ones
	$(BIN)/python -m pytest $(WORKERS) -m 'long or hypothesis' --hypothesis-profile $(PROFILE)

check: $(INSTALLED) ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/python docs/models.py --check

format: $(INSTALLED) ## make the formatters happy
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

bench: $(INSTALLED) ## the figures of docs/figures.md, as tables and JSON under bench/results
	$(BIN)/python -m bench

bench-peers: $(PEERS)/.installed ## our tree beside SGLang's, our manager beside vLLM's; needs Python 3.11
	SGLANG_SRC=$(CURDIR)/$(PEERS)/$(SGLANG) $(PEERS)/venv/bin/python -m bench.radix --repeat 2 --evict-leaves 1000,40000
	VLLM_SRC=$(CURDIR)/$(PEERS)/$(VLLM) $(PEERS)/venv/bin/python -m bench.blocks --repeat 3

plots: $(INSTALLED) ## docs/plots, drawn from bench/results
	$(BIN)/python -m pip install -q -c constraints.txt matplotlib
	$(BIN)/python -m bench.plot

models: $(INSTALLED) ## docs/models.md, made from the shipped configs
	$(BIN)/python docs/models.py

# With the Python of a GPU machine, which brings torch, triton and pytest: nothing is fetched.
test-gpu: ## all tests on a machine with a GPU, compiled kernels, offline
	$(PYTHON) -m pip install -q --no-build-isolation --no-index --no-deps --upgrade --target build/site .
	PYTHONPATH=build/site $(PYTHON) -m pytest -p no:benchmark $(WORKERS:auto=8)

clean: ## remove what was built and installed
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Build tools come first and pinned, so that a change of native/ rebuilds only what it touched.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	@echo "setting up .venv: the first time this takes a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt scikit-build-core nanobind cmake ninja numpy
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# Pagoda is installed beside the peers, so that both run in one interpreter with one torch.
$(PEERS)/.installed: bench/radix/requirements.txt bench/blocks/requirements.txt pyproject.toml constraints.txt CMakeLists.txt $(NATIVE) $(shell find src -name '*.py')
	test -x $(PEERS)/venv/bin/python || $(PEER_PYTHON) -m venv $(PEERS)/venv
	$(PEERS)/venv/bin/python -m pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja numpy torch \
		-r bench/radix/requirements.txt -r bench/blocks/requirements.txt
	$(PEERS)/venv/bin/python -m pip install -q --no-build-isolation --no-deps -C build-dir=$(PEERS)/native .
	test -d $(PEERS)/$(SGLANG) || { \
		$(PEERS)/venv/bin/python -m pip download -q --no-deps -d $(PEERS) $(subst -,==,$(SGLANG)) && \
		$(PEERS)/venv/bin/python -m zipfile -e $(PEERS)/$(SGLANG)-*.whl $(PEERS)/$(SGLANG).part && \
		mv $(PEERS)/$(SGLANG).part $(PEERS)/$(SGLANG); }
	test -d $(PEERS)/$(VLLM) || { \
		$(PEERS)/venv/bin/python -m pip download -q --no-deps -d $(PEERS) $(subst -,==,$(VLLM)) && \
		$(PEERS)/venv/bin/python -m bench.blocks.vllm_stub $(PEERS)/$(VLLM)-*.whl $(PEERS)/$(VLLM).part && \
		mv $(PEERS)/$(VLLM).part $(PEERS)/$(VLLM); }
	@touch $@
