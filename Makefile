# Every target installs what it needs: with Python 3.11 or newer and make, each works on its own.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIN    := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-cluster screenshots soak reliability check bench bench-search fix pins wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Anabranch needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements/build.txt requirements/runtime.txt pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes -r requirements/build.txt -r requirements/runtime.txt
	$(PIP) --no-deps --no-build-isolation --editable '.[all]'
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

# Java for OpenSearch, which the tests take from Maven.
$(VENV)/.cluster: requirements/cluster.txt $(VENV)/.dev
	$(PIP) --require-hashes -r requirements/cluster.txt
	@touch $@

# The packages of the tests in Node, as locked; no install scripts run.
$(VENV)/.node: tests/node/package.json tests/node/package-lock.json $(VENV)/.dev
	@mkdir -p $(VENV)/node
	@cp tests/node/package.json tests/node/package-lock.json $(VENV)/node/
	$(BIN)/npm ci --prefix $(VENV)/node --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel=error
	@touch $@

# The embedding model, into AGGREGATOR_MODELS_DIR: downloaded once, then only checked.
$(VENV)/.models: $(VENV)/.runtime
	$(BIN)/anabranch models install
	@touch $@

$(VENV)/.bench: requirements/bench.txt $(VENV)/.dev
	$(PIP) --require-hashes -r requirements/bench.txt
	@touch $@

setup: $(VENV)/.dev $(VENV)/.node $(VENV)/.models  ## install all dependencies into .venv, and the embedding model
	@echo "Ready: $(BIN)/anabranch --help"

demo: $(VENV)/.runtime $(VENV)/.models  ## ask the documents of three owners, in the terminal and on the page at 127.0.0.1:8001
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev $(VENV)/.node $(VENV)/.models  ## run the tests, with real servers
	$(BIN)/python -m pytest -m "not soak and not cluster" -n 3 --dist loadgroup

# The suites of collections, permissions, questions and keys, with records in PostgreSQL.
KNOWLEDGE := knowledge jobs hybrid_retrieval document_states ingest_lanes erased_users audit_log visibility_states \
	permission_classes collection_names document_names diversity distinct_chunks search_explained owner_limits index \
	index_integrity completed_passages rebuild replaced_records generations
APIS := collections documents document_chunks permissions query query_explained query_sources ingest feedback \
	logged_queries keys key_rights audit publishing shared_answers earlier_answers conflicts_over_http sessions \
	rag_stream openai sources
CLUSTER := $(KNOWLEDGE:%=tests/knowledge/test_%.py) $(APIS:%=tests/entrypoints/http/test_%.py)

test-cluster: $(VENV)/.cluster $(VENV)/.models  ## run the suites of collections and APIs with records in PostgreSQL and the index in OpenSearch, and those of nodes
	$(BIN)/python -m pytest -m "cluster and not soak" -n 3 --dist loadgroup
	ANABRANCH_TEST_RECORDS=postgres $(BIN)/python -m pytest -m "not soak" -n 3 --dist loadgroup $(CLUSTER)
	@if command -v mvn > /dev/null; then \
	  ANABRANCH_TEST_RECORDS=postgres ANABRANCH_TEST_INDEX=opensearch $(BIN)/python -m pytest -m "not soak" -n 2 --dist loadgroup $(CLUSTER); \
	else echo "Not run with the index in OpenSearch: that needs Java and Maven."; fi

screenshots: $(VENV)/.dev $(VENV)/.node $(VENV)/.models  ## take the pictures of the page in docs/screens again
	@mkdir -p docs/screens
	ANABRANCH_SCREENSHOTS=docs/screens $(BIN)/python -m pytest tests/web/test_page_screens.py -k axe

serve: $(VENV)/.runtime $(VENV)/.models  ## serve on 127.0.0.1:8001, with the page
	$(BIN)/anabranch serve --host 127.0.0.1

soak: $(VENV)/.dev $(VENV)/.node $(VENV)/.models  ## run the long load and fault tests; with SCENARIO=name, one fault scenario
ifdef SCENARIO
	$(BIN)/python -m pytest "tests/soak/test_faults.py::test_scenario[$(SCENARIO)]"
else
	ANABRANCH_TEST_EXAMPLES=5 $(BIN)/python -m pytest -m "soak or hypothesis"
endif

# A broken promise does not end the run: the report says so, and then make fails.
reliability: $(VENV)/.dev $(VENV)/.models  ## run all fault scenarios, and write docs/reliability.md
	rm -rf build/reliability
	-$(BIN)/python -m pytest tests/soak/test_faults.py --no-header --tb=line
	PYTHONPATH=tests $(BIN)/python -m support.fault_report

check: $(VENV)/.dev  ## check style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@find src tests -name '*.py' -exec wc -l {} + | awk '$$2 != "total" && $$1 > 600 {print "over 600 lines:", $$2, $$1}'

bench: $(VENV)/.dev  ## benchmark our server, a minimal one and a conventional one in one run
	$(BIN)/python -m benchmarks.chat

bench-search: $(VENV)/.bench $(VENV)/.models  ## compare our search with LanceDB, Chroma and bm25s, at 100,000 chunks
	$(BIN)/python -m benchmarks.search

fix: $(VENV)/.dev  ## format, and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pins: $(VENV)/.dev  ## update the pinned versions in requirements/*.txt
	$(PIN) --upgrade --all-extras pyproject.toml --output-file requirements/runtime.txt
	$(PIN) --upgrade requirements/build.in --output-file requirements/build.txt
	$(PIN) --upgrade --all-extras requirements/dev.in pyproject.toml --output-file requirements/dev.txt
	$(PIN) --upgrade requirements/cluster.in --output-file requirements/cluster.txt
	$(PIN) --upgrade requirements/bench.in --output-file requirements/bench.txt

wheel: $(VENV)/.dev  ## build a wheel in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove everything that the other targets created
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
