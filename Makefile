# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp')
INSTALLED := .venv/.installed

.PHONY: help run demo test test-gpu check format bench clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: demo ## the main job: for now, the tour

demo: $(INSTALLED) ## a tour in the terminal: allocate, write, read back, free, look
	@$(BIN)/pagoda demo

test: $(INSTALLED) ## all tests; those that need a GPU are skipped without one
	$(BIN)/python -m pytest -n auto --dist loadgroup

check: $(INSTALLED) ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: $(INSTALLED) ## make the formatters happy
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

bench: $(INSTALLED) ## the figures of docs/figures.md, as tables and JSON under bench/results
	$(BIN)/python -m bench

# With the Python of a GPU machine, which brings torch, triton and pytest: nothing is fetched.
test-gpu: ## all tests on a machine with a GPU, compiled kernels, offline
	$(PYTHON) -m pip install -q --no-build-isolation --no-index --no-deps --upgrade --target build/site .
	PYTHONPATH=build/site $(PYTHON) -m pytest -p no:benchmark -n 8 --dist loadgroup

clean: ## remove what was built and installed
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Build tools come first and pinned, so that a change of native/ rebuilds only what it touched.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	@echo "setting up .venv: the first time this takes a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
