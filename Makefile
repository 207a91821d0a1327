# `make train` and `make test` need Python 3.11 or newer and a C++ compiler; everything else is installed into .venv.
PYTHON ?= python3
CXX_FOUND := $(firstword $(foreach c,$(CXX) g++ clang++,$(shell command -v $(c) 2>/dev/null)))
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: train test test-deep lint clean

train: $(STAMP)
	$(BIN)/nsa-compile train

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-deep: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-profile=deep

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# pip runs again whenever pyproject.toml changes.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' not found; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is older than Python 3.11; name a newer one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv module; install it (on Debian: python3-venv)" >&2; exit 2; }
	@test -n "$(CXX_FOUND)" || { \
	  echo "error: no C++ compiler (CXX, g++ or clang++) found; torch.compile needs one on CPU (on Debian: g++)" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find nsa_compile tests -name __pycache__ -type d -prune -exec rm -rf {} +
