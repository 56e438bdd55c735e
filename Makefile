# Each target builds .venv and installs everything first, where that has not been done yet.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first interpreter that is new enough; `make PYTHON=/path/to/python demo` overrides it.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

# torch goes first and alone, so that the CPU wheel is taken wherever one is offered. An index of
# CPU wheels may be named: `make TORCH_INDEX=URL demo`. Without one, the default index serves.
TORCH := torch==2.13.0
TORCH_INDEX ?=
PROMPTS ?= tests/prompts/classes.jsonl

SERVER_STAMP := $(VENV)/.server-installed
DEVELOPER_STAMP := $(VENV)/.developer-installed

.PHONY: help install demo test lint stubs bench exactness clean

help:
	@echo "make demo       watch a real model answer through the whole system"
	@echo "make test       the test suite"
	@echo "make install    what serving needs, in .venv"
	@echo "make lint       ruff and mypy"
	@echo "make stubs      regenerate client/outrider/v1 from proto/"
	@echo "make bench      served speed against plain decoding and the engine alone"
	@echo "make exactness  every drafter against plain decoding, token by token (PROMPTS=FILE)"

install: $(SERVER_STAMP)

$(SERVER_STAMP): pyproject.toml client/pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed"; exit 1; }
	@test -x $(BIN)/python || { echo "== creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing torch"
	@$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@echo "== installing outrider-client and outrider"
	@$(PIP) install -q -e ./client
	@$(PIP) install -q -e .
	@touch $@

$(DEVELOPER_STAMP): $(SERVER_STAMP)
	@echo "== installing what tests and checks need"
	@$(PIP) install -q -e ".[test,dev]"
	@touch $@

demo: $(SERVER_STAMP)
	@$(BIN)/python -m cluster.demo

test: $(DEVELOPER_STAMP)
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadgroup

lint: $(DEVELOPER_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

stubs: $(DEVELOPER_STAMP)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=client --pyi_out=client \
		--grpc_python_out=client proto/outrider/v1/*.proto

bench: $(DEVELOPER_STAMP)
	$(BIN)/python -m tests.bench.served_bench --prompts $(PROMPTS)

exactness: $(DEVELOPER_STAMP)
	$(BIN)/python -m tests.bench.exactness --prompts $(PROMPTS)

clean:
	rm -rf $(VENV) build *.egg-info client/build client/*.egg-info
