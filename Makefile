# Two commands do everything: `make demo` runs the platform, `make test` tests it. Each sets up first what is missing.
PYTHON ?= python3
BIN := .venv/bin
# Tests use a stack of their own, so they run beside a stack that is up.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup up down status demo lint check-defs format test test-long test-cluster bench lock lock-jars clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install everything into .venv and the jar cache (instant when nothing changed)
	@$(PYTHON) stack/bootstrap.py

up: setup ## Start the embedded stack and print its addresses
	@$(BIN)/lockstep up

down: setup ## Stop the embedded stack; data stays
	@$(BIN)/lockstep down

status: setup ## Show the parts, their addresses and memory
	@$(BIN)/lockstep status

demo: setup ## Play the whole platform and prove every claim
	@$(BIN)/lockstep demo

lint: setup ## Format check, lint, types, definitions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory check-defs

# An instance of its own: the definitions are checked without any stack, and without the Postgres of dagster.yaml.
check-defs: setup ## Load and validate the Dagster definitions
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && echo 'telemetry: {enabled: false}' > "$$folder/dagster.yaml" && \
	DAGSTER_HOME="$$folder" VIRTUAL_ENV="$(CURDIR)/.venv" PYTHONWARNINGS=ignore $(BIN)/dg check defs

format: setup ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup ## Run all tests on an embedded stack of their own
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not serial and not long" --keep-stack; parallel=$$?; \
	$(BIN)/pytest -m "serial and not long"; serial=$$?; exit $$((parallel | serial))

test-long: setup ## The long fault and property runs
	$(BIN)/pytest -m long

# Integration tests that work on Spark, with Spark as a standalone master and two workers.
test-cluster: setup ## The tests of Spark's users on a cluster of one master and two workers
	LOCKSTEP_TEST_SPARK_CLUSTER=1 $(BIN)/pytest tests/integration/idempotency tests/integration/silver tests/integration/windows/test_drain.py tests/integration/ticks/test_finalize.py tests/e2e/exports
	$(BIN)/pytest tests/faults/test_cluster.py

bench: setup ## Measure every part against its baselines and print the ratios
	@$(BIN)/lockstep bench

lock: setup ## Pin the Python packages anew after a change of pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-emit-index-url --no-annotate --python-version 3.11 -o requirements.lock -q

lock-jars: setup ## Pin the Java archives anew after a change of stack/jars.py
	$(BIN)/python -m stack.jars lock
	$(BIN)/python -m stack.classes record

clean: ## Remove the environment (not the data of the stack)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
