# The commands a newcomer and the checks use. `make help` lists them.
#
# Everything lives in .venv inside this checkout. A stamp file records what was installed, so a second
# call starts at once; it is redone when the package's metadata or a compiled source changes.

PYTHON ?= python3
VENV   := .venv
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
# With an NVIDIA driver any torch from 2.11 on serves; without one the CPU build is pinned.
TORCH  ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
NATIVE := pyproject.toml kernels_ext/CMakeLists.txt $(shell find kernels_ext/csrc -type f)

DEMO_FLAGS := $(if $(ONCE),--once) $(if $(PORT),--port $(PORT))

.DEFAULT_GOAL := help
.PHONY: help demo test lint cuda-compile clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.installed-demo ## Set up, prune a real model to 50 %, serve it (ONCE=1: ask it twice and stop)
	$(VENV)/bin/lacunar demo $(DEMO_FLAGS)

test: $(VENV)/.installed-dev ## Set up and run the whole test suite for a machine without a GPU
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.installed-dev ## Lint, formatting, types and the import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

cuda-compile: ## Compile every CUDA source for every supported architecture (needs nvcc, no GPU)
	kernels_ext/csrc/cuda/compile_all.sh

$(VENV)/.base:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Lacunar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "Lacunar compiles its kernels: install a C++ compiler (Debian: g++)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH) (the largest download)"
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet '$(TORCH)' 'scikit-build-core>=1.0' cmake ninja
	@touch $@

# Without build isolation, so that the extension is built against the torch just installed
# and not against a second copy that pip would download for the build alone.
$(VENV)/.installed-%: $(VENV)/.base $(NATIVE)
	@echo "Building kernels_ext and installing Lacunar with its '$*' extras"
	$(PIP) install --quiet --no-build-isolation --editable '.[demo,$*]'
	@$(VENV)/bin/python -m kernels_ext
	@touch $@

clean: ## Remove the environment, the builds and the demo's model
	rm -rf $(VENV) build .demo
