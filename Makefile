# `make demo` and `make test` do all their own set-up: they need Python 3.10 or newer, and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Some machines forbid writing .pyc files; Airflow starts twice as fast with them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types imports unit lowest resilience semantics failover bench sql reference wheel clean help

help: ## Say what there is to make.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 13

demo: $(VENV)/.demo ## A partitioned job through real Airflow, one worker killed on the way (KEEP=1 leaves it running).
	@$(BIN)/dbpartition demo $(if $(filter-out 0,$(KEEP)),--keep)

# Most tests wait for processes and databases: two at a time take little more than half the time.
# In the order of their names: else the long files of few tests come last, when there is nothing beside them.
test: override PYTEST_ARGS := --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
test: export DBPARTITION_TEST_ROUNDS ?= 0.5
test: lint types imports ## Everything: lint, types, import contracts, and all tests.
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## Ruff: rules and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## Mypy, strict, on package, tests and the scripts of the docs.
	$(BIN)/mypy
	$(BIN)/mypy --strict docs/*.py
	$(BIN)/mypy --strict benchmarks/*.py
	MYPYPATH=benchmarks $(BIN)/mypy --strict --ignore-missing-imports benchmarks/peers/*.py

imports: $(VENV)/.dev ## Import contracts.
	$(BIN)/lint-imports

unit: $(VENV)/.dev ## Only the quick tests, without databases or processes.
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

# The oldest Airflow that this package claims to work with.
LOWEST_AIRFLOW := 3.3.0

lowest: ## The demo and the Airflow tests on the oldest Airflow that is supported, in an environment of its own.
	$(MAKE) $(VENV)-lowest/.dev VENV=$(VENV)-lowest PINS='apache-airflow==$(LOWEST_AIRFLOW)'
	$(VENV)-lowest/bin/python -m pytest tests/airflow tests/e2e $(PYTEST_ARGS)

# Where else there are tests that `make test` leaves out, or runs the shorter for.
LONG_TESTS := tests/races tests/model tests/e2e tests/integration/test_airflow_processes.py tests/worker tests/docs tests/deploy \
	tests/airflow/test_shared_poller.py tests/airflow/test_stories.py

resilience: $(VENV)/.dev ## Break everything, at length: kills, freezes, outages, cut connections (the short half is in `make test`).
	DBPARTITION_RESILIENCE=long $(BIN)/python -m pytest tests/resilience $(LONG_TESTS) $(PYTEST_ARGS)

semantics: $(VENV)/.dev ## Every cell of docs/reference/airflow-semantics.md on a real Airflow (the dozen that matter most are in `make test`).
	DBPARTITION_SEMANTICS=all $(BIN)/python -m pytest tests/airflow/semantics $(PYTEST_ARGS)

failover: $(VENV)/.dev ## Measure how long a killed worker's partition takes to run elsewhere.
	$(BIN)/python benchmarks/failover.py

bench: $(VENV)/.dev $(VENV)-bench/.peers ## Measure all, beside peers, into benchmarks/results (ONLY='throughput plan', BENCH_ARGS=--quick).
	$(BIN)/python benchmarks/run.py $(ONLY) --peers-python $(VENV)-bench/bin/python $(BENCH_ARGS)

sql: $(VENV)/.dev ## Print the schema into sql/ again.
	for dialect in postgresql mysql sqlite; do $(BIN)/dbpartition db sql --dialect $$dialect --directory sql/$$dialect; done

reference: $(VENV)/.dev ## Print docs/reference again, and pull the examples into the pages.
	$(BIN)/python docs/print_reference.py
	$(BIN)/python docs/pull_examples.py

wheel: $(VENV)/.dev ## Build wheel and sdist into dist/.
	$(BIN)/python -m build

clean: ## Remove what the other targets made.
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-bench dist .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: $(PYTHON) is older than Python 3.10: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "error: $(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)"; exit 1; }

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (about a minute, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (about a minute, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e '.[dev]' $(PINS)
	@touch $@

# A peer that cannot be installed here is left out of the tables: all at once, or else one by one.
$(VENV)-bench/.peers: benchmarks/peers.txt | $(VENV)/bin/python
	@echo "installing the peers of the benchmarks into $(VENV)-bench"
	@$(PYTHON) -m venv $(VENV)-bench
	@$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -r $< \
		|| for peer in $$(grep -v '^#' $<); do \
			$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check "$$peer" || true; \
		done
	@touch $@
