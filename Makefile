# The two commands are `make up` (run the line) and `make test` (run every check).
# They need Python >= 3.11, a C++ compiler and make; all else is installed into .venv.

PYTHON ?= python3
MODEL ?=
PORT ?= 8000
BIN := .venv/bin
PROTOS := $(shell find protos -name '*.proto' -not -path '*/.*')
PACKAGING := pyproject.toml setup.py $(PROTOS)

.DEFAULT_GOAL := help
.PHONY: help up test dev lint types native bench clean

help: ## Lists these commands.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: .venv/installed-engine ## Runs the whole line with the default model, or with MODEL=…, on PORT=8000.
	@$(BIN)/python kernels/cpu/build.py --this-machine --optional
	@exec $(BIN)/tokenline up --port $(PORT) $(if $(MODEL),--model $(MODEL))

test: .venv/installed-dev lint types ## Runs every check: lint, types, all tests.
	@$(BIN)/python kernels/cpu/build.py
	@# The GPU's kernels are compiled beside the tests, which mostly wait; theirs finds what there is.
	@nice -n 19 $(BIN)/python -m kernels.gpu.ahead_of_time --workers 1 > /dev/null 2>&1 & compiling=$$!; \
	$(BIN)/python -m pytest --durations 20; status=$$?; \
	kill $$compiling 2> /dev/null; exit $$status

dev: .venv/installed-dev ## Installs what tests and benches need, too.

lint: .venv/installed-dev ## Checks style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev ## Checks types.
	$(BIN)/mypy .

native: .venv/installed-engine ## Compiles the CPU kernels for every machine like this one, where sources changed.
	@$(BIN)/python kernels/cpu/build.py

bench: .venv/installed-dev ## Measures the pipeline against the engine alone.
	$(BIN)/python -m tests.bench pipeline

clean: ## Removes the environment, the generated stubs and every cache. Models stay.
	rm -rf .venv build dist kernels/cpu/lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find protos -name '*_pb2*' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tokenline needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Stamps: installed once, and again when the dependencies or the .proto files changed.
.venv/installed-engine: $(BIN)/python $(PACKAGING)
	@echo "installing into .venv: about a minute, once"
	$(BIN)/python -m pip install --quiet --editable '.[engine]'
	@touch $@

.venv/installed-dev: $(BIN)/python $(PACKAGING)
	@echo "installing into .venv: about a minute, once"
	$(BIN)/python -m pip install --quiet --editable '.[engine,dev]'
	@touch $@ .venv/installed-engine
