# Every target makes .venv by itself, and again when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= demo
BIN := .venv/bin
GPU := $(shell command -v nvidia-smi 2>/dev/null)
# Without a GPU the CPU build of torch, which is 2 GB smaller. Its local version 2.x+cpu wins over
# the index's 2.x; `TORCH_INDEX=` asks for no second index.
TORCH_INDEX ?= $(if $(GPU),,https://download.pytorch.org/whl/cpu)
comma := ,
EXTRAS := dev$(if $(GPU),$(comma)gpu)

.PHONY: setup serve test test-slow bench demo-eval demo-score demo-train gpu-check clean

setup: .venv/stamp

.venv/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --retries 1 --no-deps -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

serve: setup
	$(BIN)/penstock serve $(MODEL) --port $(PORT)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not slow and not gpu"

test-slow: setup
	$(BIN)/pytest -m "slow and not gpu"

bench: setup
	$(BIN)/python -m loadtest.bench_cpu

demo-eval:
	@$(MAKE) --no-print-directory demo-score DEMO=demo
	@$(MAKE) --no-print-directory demo-score DEMO=demo-translate

DEMO ?= demo

demo-score: setup
	@port=$$($(BIN)/python -c 'import socket as s; l = s.create_server(("127.0.0.1", 0)); \
		print(l.getsockname()[1])'); url=http://127.0.0.1:$$port; \
	$(BIN)/penstock serve $(DEMO) --port $$port --log-level warning & server=$$!; \
	trap "kill $$server; wait $$server" EXIT; \
	until curl -sf $$url/ready >/dev/null; do kill -0 $$server || exit 1; sleep 0.2; done; \
	$(BIN)/python -m engine.demo.evaluate --base-url $$url/v1

demo-train: setup
	$(BIN)/python -m engine.demo.train
	$(BIN)/python -m engine.demo.train --model translate

gpu-check: setup
	@if [ -n "$(GPU)" ]; then $(BIN)/pytest -m gpu; \
	else echo "gpu-check: no nvidia-smi here, so there is no GPU to check; nothing was run."; fi

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
		.hypothesis
