# Everything here makes what it needs: a virtual environment in .venv, with manyhands installed in it.
PYTHON ?= python3
BIN := .venv/bin

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadgroup --max-worker-restart 0 --durations 20 --durations-min 1

.PHONY: demo test test-slow test-all test-nightly test-changed lint docs bench results wheel clean

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "manyhands needs Python 3.11 or newer, this is " + sys.version + "; say which: make PYTHON=python3.12 demo"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch>=2.6,<2.14' numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[report]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: .venv/installed  ## train the digits task alone and on two workers, then compare strategies on it
	@echo '$$ manyhands train digits --workers 1'
	@$(BIN)/manyhands train digits --workers 1
	@echo
	@echo '$$ manyhands train digits --workers 2'
	@$(BIN)/manyhands train digits --workers 2
	@echo
	@echo '$$ manyhands compare digits --epochs 5 --validations 10'
	@$(BIN)/manyhands compare digits --epochs 5 --validations 10

test: lint  ## format, lint, types, layers, and the fast tests
	$(PYTEST)

test-slow: .venv/installed-dev  ## the slow tests alone
	$(PYTEST) -m "slow and not nightly"

test-all: test test-slow  ## what continuous integration runs

test-nightly: .venv/installed-dev  ## searches over many schedules and inputs, and what needs minutes, GPUs, containers or a release
	$(PYTEST) -m nightly --fuzz 1000000
	$(PYTEST) -k fuzzed --fuzz 100000

test-changed: .venv/installed-dev  ## the fast tests of what differs from the last commit (BASE=COMMIT: from that one)
	tests=$$($(BIN)/python tools/changed_tests.py $(BASE)) && $(PYTEST) $$tests

lint: .venv/installed-dev  ## format, lint, types, layers
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-dev  ## the site, in build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/installed  ## the measured claims, each beside its peer
	$(BIN)/python benchmarks/all_reduce.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/ring.py
	$(BIN)/python benchmarks/hogwild.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/accuracy.py

results: .venv/installed-dev  ## docs/results.md, from real runs of this machine (about ten minutes, which it should have for itself)
	$(BIN)/python benchmarks/results.py

wheel:  ## the wheel and the sdist, into dist/
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
