# `make train` and `make test` need Python 3.11 or newer and a C++ compiler; everything else is installed into .venv,
# for `make train` what the trainer needs, for the others what the tests and linters need as well.
PYTHON ?= python3
CXX_FOUND := $(firstword $(foreach c,$(CXX) g++ clang++,$(shell command -v $(c) 2>/dev/null)))
BIN := .venv/bin
TRAINER := .venv/installed-for-train
TESTS := .venv/installed-for-test

.PHONY: train test test-all test-deep pytest lint docs clean

train: $(TRAINER)
	$(BIN)/nsa-compile train

test-all: OPTIONS := --every-case
test-deep: OPTIONS := --hypothesis-profile=deep

test test-all test-deep: lint pytest

pytest: $(TESTS)
	$(BIN)/python -m pytest -q -n logical --dist worksteal $(OPTIONS)

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

$(TRAINER): EXTRAS := train,plots
$(TESTS): EXTRAS := dev

# pip runs again whenever pyproject.toml changes. Of 20,000 files Python compiles the few that are imported.
$(TRAINER) $(TESTS): pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' not found; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is older than Python 3.11; name a newer one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv module; install it (on Debian: python3-venv)" >&2; exit 2; }
	@test -n "$(CXX_FOUND)" || { \
	  echo "error: no C++ compiler (CXX, g++ or clang++) found; torch.compile needs one on CPU (on Debian: g++)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf .venv build dist site *.egg-info .hypothesis .pytest_cache .ruff_cache
	find nsa_compile tests -name __pycache__ -type d -prune -exec rm -rf {} +

docs: lint
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/mkdocs build --strict
