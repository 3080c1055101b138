# `make demo` and `make test` work on a fresh clone: they make the virtual environment first.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread per process, as several run at once; and no test may reach out to the Hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n 2

.DEFAULT_GOAL := help
.PHONY: help install check format test test-slow test-all demo bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make the virtual environment in .venv

# torch comes first and by its exact version: a looser request, by us or by a dependency, would fetch
# a CUDA build of gigabytes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,dev,bench]'
	@touch $@

check: $(STAMP) ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP) ## the tests, but for the slow ones
	$(PYTEST) tests -m "not slow" $(PYTEST_ARGS)

# pytest ends with 5 where it finds no test, which is no failure here.
test-slow: $(STAMP) ## the slow tests
	@$(TEST_ENV) $(BIN)/python -m pytest -q --collect-only tests -m slow >/dev/null; \
	if [ $$? -eq 5 ]; then echo "No test is marked slow."; \
	else $(PYTEST) tests -m slow $(PYTEST_ARGS); fi

test-all: $(STAMP) ## every test
	$(PYTEST) tests $(PYTEST_ARGS)

demo: $(STAMP) ## train, kill, resume on other ranks, inspect, merge, generate
	FSDP_CKPT=$(BIN)/fsdp-ckpt bash docs/demo.sh

bench: $(STAMP) ## measure against cp, accelerate and torch (BENCH_ARGS=--help)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean: ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
