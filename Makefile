# Targets that need .venv create it, and update it if pyproject.toml or constraints.txt changed.
# A line `target: ## text` is printed by `make help`.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= demo
MINUTES ?= 60
# One more than the cores of CI: tests of servers also wait for timers and signals.
WORKERS ?= 3
BIN := .venv/bin
# Compiled files halve the time that pytest needs to collect the tests.
unexport PYTHONDONTWRITEBYTECODE
GPU := $(shell command -v nvidia-smi 2>/dev/null)
# Without a GPU, install torch's CPU build, which is 2 GB smaller. It has an index of its own, and
# each command of pip asks one index. `TORCH_INDEX=` takes torch from PyPI.
TORCH_INDEX ?= $(if $(GPU),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/pip --disable-pip-version-check install -c constraints.txt

.PHONY: help install serve setup lint check compiled test test-assets test-slow test-ui test-clients durations fuzz bench bench-peers demo-eval demo-score \
	demo-train gpu-check gpu-ablations gpu-wheels dist release docs sbom lock clean

help: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

install: .venv/serving ## install what serving needs, and start nothing

serve: .venv/serving ## serve MODEL (demo) on PORT (8000), after installing what serving needs
	$(BIN)/penstock serve $(MODEL) --port $(PORT)

setup: .venv/stamp ## install what the tests need too

# venv keeps existing links: the link of another Python would load the library of this one.
.venv/serving: pyproject.toml constraints.txt
	rm -f .venv/bin/python*
	$(PYTHON) -m venv .venv
	$(PIP) --retries 1 --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch \
		|| { echo "make: torch is not at $(TORCH_INDEX). 'make TORCH_INDEX=' asks PyPI."; exit 1; }
	$(PIP) -e '.$(if $(GPU),[gpu])'
	touch $@

.venv/stamp: .venv/serving
	$(PIP) -q -e '.[dev]'
	touch $@

lint: setup ## check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## lint, and run the tests nearest to what changed since the last commit
	$(BIN)/python -m tests.nearest

# Collecting compiles the test files; otherwise each worker of pytest does that in a new clone.
compiled: setup
	@$(BIN)/pytest --collect-only -qq > /dev/null 2>&1 || true  # errors: see the run that follows

test: setup ## lint, and run all tests that need no GPU and no browser and take no minutes
	@$(MAKE) --no-print-directory -j2 lint compiled
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not slow and not gpu and not clients and not ui"

durations: setup ## run the tests of `make test`, and write how long each file takes
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --write-durations \
		-m "not slow and not gpu and not clients and not ui"

# The rest of `make test` needs nothing outside the repository.
test-assets: setup ## run the quick tests that use the reference data (docs/development.md)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "assets and not slow and not gpu and not clients and not ui"

# Tests without hypothesis that try more under TEST_THOROUGH.
THOROUGH := $(addprefix tests/,server/text/parsers/test_detect.py faults/test_nth_fault.py \
	engine/grammar/test_compiler.py engine/kernels/triton/test_codes.py engine/models)

test-slow: setup ## run the tests that take minutes
	TEST_THOROUGH=1 $(BIN)/pytest -m "slow and not gpu and not ui"
	TEST_THOROUGH=1 $(BIN)/pytest -m "hypothesis and not slow and not gpu and not clients and not ui"
	TEST_THOROUGH=1 $(BIN)/pytest -m "not slow" $(THOROUGH)

test-ui: setup ## drive the built-in pages with Debian's chromium (apt install chromium)
	$(BIN)/pytest -m ui tests/ui

test-clients: setup ## install other people's clients (6 GB) and run them: a table of what each can do
	$(BIN)/pytest -m clients -s tests/clients

fuzz: setup ## try mutated inputs on everything that reads them: MINUTES (60)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

bench: setup ## measure the tables of docs/performance.md
	$(BIN)/python -m loadtest.bench_cpu

bench-peers: setup ## compare with other servers, each in its own environment: PEERS_FLAGS
	$(BIN)/python -m loadtest.bench_peers $(PEERS_FLAGS)

demo-eval: ## ask the demo models what they were not trained on, over HTTP
	@$(MAKE) --no-print-directory demo-score DEMO=demo
	@$(MAKE) --no-print-directory demo-score DEMO=demo-translate
	@$(MAKE) --no-print-directory demo-score DEMO=demo-vision

DEMO ?= demo

demo-score: setup
	@port=$$($(BIN)/python -c 'import socket as s; l = s.create_server(("127.0.0.1", 0)); \
		print(l.getsockname()[1])'); url=http://127.0.0.1:$$port; \
	$(BIN)/penstock serve $(DEMO) --port $$port --log-level warning & server=$$!; \
	trap "kill $$server; wait $$server" EXIT; \
	until curl -sf $$url/ready >/dev/null; do kill -0 $$server || exit 1; sleep 0.2; done; \
	$(BIN)/python -m engine.offline.demo_training.evaluate --base-url $$url/v1

demo-train: setup ## make the demo models again: text, tokenizer, weights
	$(BIN)/python -m engine.offline.demo_training.train
	$(BIN)/python -m engine.offline.demo_training.train --model translate
	$(BIN)/python -m engine.offline.demo_training.train --model vision

# The machine with the GPU may have its own Python with torch and triton, and no network. Then run
# `make gpu-wheels` on another machine and copy the tree: this adds the other packages. Penstock's
# wheel only provides the version, because the tree comes first in the path.
GPU_PYTHON ?= $(if $(wildcard .venv/stamp),.venv/bin/python,python3)
GPU_PYTHON_VERSION ?= 3.12
GPU_SITE := build/gpu-site
GPU_JSON ?= build/$@.json

gpu-wheels: setup ## download what a GPU machine without network needs
	rm -rf build/gpu-wheels
	$(BIN)/pip wheel -q --no-deps -w build/gpu-wheels .
	$(BIN)/pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		-c constraints.txt -d build/gpu-wheels annotated-doc annotated-types fastapi httpcore2 httpx2 \
		execnet msgspec opentelemetry-api orjson prometheus-client pydantic pydantic-core pytest \
		pytest-asyncio pytest-timeout pytest-xdist python-multipart pyzmq sse-starlette starlette \
		structlog truststore typer typing-inspection uvicorn

GPU_SECONDS ?= 540
# `GPU_DRY=1` walks the same sections on a CPU, with small models: its times say nothing.
GPU_DRY ?=
DRY_RUN = mkdir -p build; $(BIN)/python -m loadtest.gpu --smoke --json build/$@-dry.json \
	--budget $(GPU_SECONDS)
GPU_READY = if [ -d build/gpu-wheels ]; then rm -rf $(GPU_SITE); \
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --target $(GPU_SITE) build/gpu-wheels/*; fi; \
	mkdir -p build; export PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE)
NO_GPU = @echo "$@: nvidia-smi was not found, so there is no GPU to check. Nothing was run."

gpu-check: ## on a machine with a GPU: its tests, then its figures against the bounds (9 minutes)
ifneq ($(GPU_DRY),)
	@$(DRY_RUN)
else ifeq ($(GPU),)
	$(NO_GPU)
else
	@began=$$(date +%s); status=0; $(GPU_READY); \
	timeout 200 $(GPU_PYTHON) -m pytest -q -n 8 --dist worksteal -W default -m gpu tests/gpu || status=1; \
	$(GPU_PYTHON) -m loadtest.gpu --json $(GPU_JSON) \
		--budget $$(($(GPU_SECONDS) + began - $$(date +%s))) || status=1; exit $$status
endif

gpu-ablations: ## on a machine with a GPU: kernel sweeps, the value of each optimisation, a peer
ifneq ($(GPU_DRY),)
	@$(DRY_RUN) --group ablations
else ifeq ($(GPU),)
	$(NO_GPU)
else
	@$(GPU_READY); $(GPU_PYTHON) -m loadtest.gpu --group ablations --json $(GPU_JSON) \
		--budget $(GPU_SECONDS)
endif

# The address of the repository, for links in the metadata of a release.
PROJECT_URL ?=
export PROJECT_URL

dist: ## build the wheel and the source archive in dist/, from the files that git tracks
	rm -rf dist build/release-tree
	mkdir -p build/release-tree
	git ls-files -z | tar -c --null -T - | tar -x -C build/release-tree
	$(PYTHON) -m venv build/release-tool
	build/release-tool/bin/pip --disable-pip-version-check -q install -c constraints.txt build twine
	build/release-tool/bin/python -m build --outdir dist build/release-tree >build/dist.log \
		|| { cat build/dist.log; exit 1; }
	build/release-tool/bin/twine check --strict dist/*

release: setup dist sbom ## build dist/, check it, and use it in an empty environment (docs/releasing.md)
	WHEEL=$$(echo dist/*.whl) $(BIN)/pytest -m slow -s tests/deploy/test_wheel.py

# The tool has an environment of its own. It needs no network to build.
docs: ## build the documentation as a site with a search in build/docs/site
	$(PYTHON) -m venv build/docs-tool
	build/docs-tool/bin/pip --disable-pip-version-check -q install -c constraints.txt zensical
	$(PYTHON) -m deploy.site.pages build/docs
	cd build/docs && ../docs-tool/bin/zensical build --strict

# The tool has an environment of its own, so that it is not part of its list.
sbom: .venv/serving ## write build/sbom.json: the packages that serving installs (CycloneDX)
	$(PYTHON) -m venv build/sbom-tool
	build/sbom-tool/bin/pip --disable-pip-version-check -q install cyclonedx-bom==7.5.0
	build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o build/sbom.json .venv

# torch's CPU builds are not on PyPI. The hashes of deploy/requirements/torch-cpu.txt are those that
# their index shows: change them by hand.
TORCH_SOURCE ?= --torch-backend cpu
LOCK := build/lock-tool/bin/uv pip compile -q --generate-hashes --only-binary :all: --no-annotate \
	--python-version 3.11 --python-platform x86_64-manylinux_2_35 --custom-compile-command "make lock" \
	-c constraints.txt pyproject.toml
LOCKED := deploy/requirements

lock: ## after a change of constraints.txt: write the hashes of the packages that the images install
	$(PYTHON) -m venv build/lock-tool
	build/lock-tool/bin/pip --disable-pip-version-check -q install uv==0.13.9
	$(LOCK) $(TORCH_SOURCE) --no-emit-package torch --extra otel -o $(LOCKED)/cpu.txt
	$(LOCK) $(TORCH_SOURCE) --no-emit-package torch --extra otel --extra loadtest \
		-o $(LOCKED)/loadtest.txt
	$(LOCK) $(TORCH_SOURCE) --no-emit-package torch --extra ray -o $(LOCKED)/ray.txt
	$(LOCK) --extra gpu --extra otel -o $(LOCKED)/cuda.txt

clean: ## remove .venv and all caches
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
		.hypothesis
