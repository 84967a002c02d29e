# `make` shows what there is. On a fresh machine: `make demo`, `make test`.

# The Python that the environment is made with, and that `make gpu-test` runs.
PYTHON ?= python3
export TORCH TORCH_PIP_ARGS

BIN = .env-fusepatch/venv/bin
# Nothing from outside the environment, and nothing from a hub. One thread per test process: there is one per core.
RUN = env -u PYTHONPATH -u PYTHONHOME HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
	TOKENIZERS_PARALLELISM=false $(BIN)
PYTEST = OMP_NUM_THREADS=1 $(RUN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: help demo test test-all test-oldest gpu-test lint docs-tables clean python env-demo env-test env-oldest \
	upstream-sources
.NOTPARALLEL:

help:
	@echo 'make demo         set up an environment in .env-fusepatch/ and run `fusepatch demo`'
	@echo 'make test         set it up for development, then lint, types and the CPU tests'
	@echo 'make test-all     the same, with the slow tests'
	@echo 'make test-oldest  the tests that depend on PyTorch and transformers, with the oldest releases that are supported'
	@echo 'make gpu-test     the tests that need a GPU, with PYTHON as it is: nothing is installed. After `make test`,'
	@echo '                  PYTHON=$(BIN)/python is one that has all they need'
	@echo 'make lint         ruff and mypy'
	@echo 'make docs-tables  write the docs that are made from code'
	@echo 'make clean        remove the environment, caches and build outputs'
	@echo
	@echo 'Variables, as in `make test PYTHON=python3.12`:'
	@echo '  PYTHON          Python 3.10 or newer; now $(PYTHON)'
	@echo '  TORCH           the requirement for PyTorch, but for test-oldest: with no GPU, torch==2.13.0; with one, the'
	@echo '                  PyTorch >= 2.11 that PYTHON has is used, and torch>=2.11 installed where it has none'
	@echo '  TORCH_PIP_ARGS  further arguments of that `pip install`. Without a GPU, "--index-url ADDRESS" with the address'
	@echo "                  that PyTorch's install page gives for CPU builds saves gigabytes: pip's default on Linux is a"
	@echo '                  CUDA build. It works without a GPU too.'
	@echo '  DEMO_ARGS       further arguments of `fusepatch demo`'
	@echo '  PYTEST_ARGS     further arguments of pytest'
	@echo 'A change of TORCH or TORCH_PIP_ARGS takes effect after `make clean`.'

demo: env-demo
	@$(RUN)/fusepatch demo $(DEMO_ARGS)

test: lint upstream-sources
	@$(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: lint upstream-sources
	@$(PYTEST) -m "not gpu" --timeout 1200 $(PYTEST_ARGS)

test-oldest: BIN = .env-fusepatch/oldest/venv/bin
test-oldest: env-oldest
	@$(PYTEST) -m "not slow and not gpu" --override-ini "testpaths=compat_tests/unit compat_tests/numerics" $(PYTEST_ARGS)

gpu-test: python
	@$(PYTHON) -c 'import torch, sys; torch.cuda.is_available() or sys.exit("make gpu-test: no CUDA device that PyTorch can use")'
	PYTHONPATH="accelerate$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: env-test
	$(RUN)/python -m ruff check .
	$(RUN)/python -m ruff format --check .
	$(RUN)/python -m mypy

docs-tables: env-test
	@$(RUN)/python docs/generate.py

env-demo env-test env-oldest: env-%: python
	@$(PYTHON) scripts/environment.py $*

# transformers' own tests, which the tests run: here, since those stay off the network.
upstream-sources: env-test
	@$(RUN)/python compat_tests/upstream/transformers_source.py

# Before any of our files is read, so that an old Python gives a sentence and not a syntax error.
python:
	@command -v $(firstword $(PYTHON)) >/dev/null || \
		{ echo 'fusepatch: no $(firstword $(PYTHON)) found; name a Python 3.10 or newer: make ... PYTHON=python3.x' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "fusepatch: needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | head -n 1); name another: make ... PYTHON=python3.x" >&2; exit 1; }

clean:
	rm -rf .env-fusepatch .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site accelerate/*.egg-info
	find accelerate benchmarks compat_tests docs kernels scripts shims -name __pycache__ -type d -prune -exec rm -rf {} +
