# make demo trains four models from a bare checkout, and writes a table of perplexities and a report. make test: the fast tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# make demo STEPS=200: 200 steps per model; runs and report are written to logs/compare/demo-200
STEP_FLAGS = '{"trainer.max_steps": $(STEPS), "trainer.val_check_interval": $(shell echo $$((($(STEPS) + 3) / 4)))}'
SMALLER = $(if $(STEPS),--flags $(STEP_FLAGS) --runs logs/compare/demo-$(STEPS) --output logs/compare/demo-$(STEPS)/report)

.PHONY: demo pretrained test test-numbers test-slow test-remote lint format docs bench gpu gpu-bundle gpu-toy clean
.DEFAULT_GOAL := help

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# Torch is installed first, with its dependencies. Then the lock is installed without dependencies, so that no package can
# install another torch. Before any download, the recipe checks that the index has a wheel of this torch for this Python. If
# no index answers, the message of pip would be about the version.
PIP := $(RUN) -m pip --disable-pip-version-check
TORCH := $(patsubst torch==%,%,$(shell grep '^torch==' requirements.txt))
# on a terminal, pip shows its progress; GNU make from version 4.1 sets MAKE_TERMOUT there
QUIET = $(if $(MAKE_TERMOUT),,--quiet)
INDEX = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
$(VENV)/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "make: found $$($(PYTHON) --version), but 3.11 or later is needed: make PYTHON=python3.13 ..."; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || \
	  { echo "make: $$($(PYTHON) --version) has no venv; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@wheels=$$($(PIP) index versions torch $(INDEX) --retries 1 2>/dev/null | sed -n 's/^Available versions: /, /p'); \
	  case "$$wheels," in *", $(TORCH),"*|*", $(TORCH)+"*) exit 0 ;; \
	  ,) test -z "$$PIP_NO_INDEX" || exit 0; \
	     echo "make: $(or $(TORCH_INDEX),the package index of pip) does not answer; check the network and the address" ;; \
	  *) echo "make: torch $(TORCH), the version of the lock, has no wheel for $$($(PYTHON) --version): make PYTHON=python3.13 ..." ;; \
	  esac; test -e $@ || rm -rf $(VENV); exit 1
	@test -n "$(TORCH_INDEX)" -o "$$(uname)" != Linux -o -e /dev/nvidiactl -o -e /dev/dxg || { echo "make: found no NVIDIA" \
	  "device; torch includes 3 GB of CUDA. To omit it: make ... TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
	  test ! -t 1 || { echo "make: continues in 10 seconds; Ctrl-C stops"; sleep 10; }; }
	@echo "make: installs torch $(TORCH) into $(VENV)," $(if $(findstring /cpu,$(TORCH_INDEX)),"a download of 0.2 GB", \
	  "on Linux with CUDA, a download of 3 GB (about 5 minutes at 10 MB/s)")
	$(PIP) install $(QUIET) $(INDEX) torch==$(TORCH)
	@echo "make: installs the $$(grep -c == requirements.txt) packages of requirements.txt into $(VENV), 1.2 GB on disk (a few minutes)"
	$(PIP) install $(QUIET) --no-deps -r requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@echo "make: $(VENV) is complete and takes $$(du -sh $(VENV) | cut -f1)"
	@touch $@

demo: $(VENV)/ready ## train KERPLE-log, ALiBi, RoPE and sinusoidal for a minute or two each, test up to 32x the training length
	$(RUN) run.py demo $(SMALLER)

pretrained: $(VENV)/pretrained ## test a pretrained model at up to 16,384 tokens, with RoPE unchanged and scaled by PI, NTK and YaRN
	$(RUN) run.py compare --config results/earlier/pretrained/comparison.yaml

$(VENV)/pretrained: $(VENV)/ready requirements-pretrained.txt
	$(PIP) install --quiet --no-deps -r requirements-pretrained.txt
	@touch $@

# Three workers for two cores, because some tests wait for processes that they start. worksteal keeps the tests of a file
# together. The longest test is first, so that no worker waits for it at the end.
test: $(VENV)/ready ## run the fast tests, and list the ten slowest
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/compare/test_command.py tests -n 3 --dist worksteal -m "not slow" --durations=10

# Vectorised exp, pow and log round differently in each instruction set, so a test can pass only on its author's processor.
# On a processor with AMX, torch's attention in bf16 fails with fewer instructions unless oneDNN is limited too.
test-numbers: $(VENV)/ready ## run the fast tests of numbers as on processors with AVX2 only, and without AVX
	for set in avx2 default; do ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=$$set OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/attention tests/positions \
	  tests/model tests/measure -n 3 --dist worksteal -m "numbers and not slow" || exit 1; done

# lm-evaluation-harness needs an older python-dateutil than pandas, so it is installed into a separate folder
$(VENV)/lm-eval/ready: $(VENV)/ready requirements-lm-eval.txt
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/lm-eval -r requirements-lm-eval.txt
	@touch $@

# botocore needs an older python-dateutil than pandas, so it is in a second environment, which sees the packages of the first
REMOTE := $(VENV)/remote/bin/python
$(VENV)/remote/ready: $(VENV)/ready requirements-remote.txt
	$(RUN) -m venv $(VENV)/remote
	$(RUN) -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > \
	  $$($(REMOTE) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth
	$(REMOTE) -m pip --disable-pip-version-check install --quiet --no-deps -r requirements-remote.txt
	@touch $@

test-slow: $(VENV)/pretrained $(VENV)/lm-eval/ready test-remote ## run the tests that take minutes
	$(RUN) -m pytest -m slow $(REMOTE_TESTS:%=--ignore=%)

REMOTE_TESTS := tests/compare/test_ray.py tests/data/test_buckets.py tests/test_slurm.py
test-remote: $(VENV)/remote/ready ## run the slow tests of Ray, Slurm and buckets, on Ray nodes and servers of this machine
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) OMP_NUM_THREADS=1 $(REMOTE) -m pytest -m slow $(REMOTE_TESTS)

lint: $(VENV)/ready ## check style, types, and the order of imports between packages
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) docs/stubs.py --check
	$(VENV)/bin/lint-imports
	$(RUN) -m mypy

format: $(VENV)/ready ## format the code, and write positions/__init__.pyi
	$(RUN) docs/stubs.py
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(VENV)/docs ## write the catalogue of strategies, and build the documentation in site/; warnings are errors
	$(RUN) docs/catalogue.py
	$(RUN) docs/stage.py
	@$(VENV)/bin/zensical build --clean --strict > $(VENV)/docs.log 2>&1; failed=$$?; cat $(VENV)/docs.log; \
	  test $$failed = 0 && ! grep -q '^griffe: ' $(VENV)/docs.log # --strict ignores warnings of griffe about docstrings

$(VENV)/docs: $(VENV)/ready requirements-docs.txt
	$(PIP) install --quiet --no-deps -r requirements-docs.txt
	@touch $@

bench: $(VENV)/ready ## time a training step against hand-written blocks and other libraries; NAME=processor writes a record
	$(RUN) -m benchmarks.peers $(if $(NAME),--name $(NAME))

# A GPU machine has torch already, and may have no network. The bundle is a folder with the other requirements.
BUNDLE := data/gpu-bundle
GPU_WHEELS = $(shell grep -E '^(braceexpand|docstring_parser|jsonargparse|lightning-bolts|typeshed_client|webdataset|zstandard)==' requirements.txt)
GPU_PYTHON ?= 3.12
gpu-bundle: $(BUNDLE)/shards/manifest.json $(BUNDLE)/code.tar.zst ## download wheels (for GPU_PYTHON=3.12) and prepare shards, for `make gpu` without a network
	rm -rf $(BUNDLE)/wheels $(BUNDLE)/site
	$(PIP) download --quiet --no-deps --only-binary=:all: --ignore-requires-python --python-version $(GPU_PYTHON) \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --dest $(BUNDLE)/wheels $(GPU_WHEELS)
	@for part in shards code.tar.zst; do \
	  size=$$( (git ls-files -z; find $(BUNDLE)/wheels $(BUNDLE)/$$part -type f -print0) | du --bytes --total --files0-from=- | tail -1 | cut -f1); \
	  echo "make: the source tree, $(BUNDLE)/wheels and $(BUNDLE)/$$part take $$((size >> 20)) MiB; the limit is 60 MiB"; \
	  test $$size -lt $$((60 << 20)) || exit 1; done

$(BUNDLE)/shards/manifest.json: $(VENV)/ready
	$(RUN) run.py prepare --config configs/gpu.yaml --data.corpus '$(VENV)/lib/python3*/site-packages/torch*/**/*.py'

$(BUNDLE)/code.tar.zst: $(VENV)/ready
	$(RUN) run.py prepare --config configs/data/code.yaml
	PYTHONPATH=src $(RUN) -m benchmarks.gpu.trainings

gpu: ## run the measurements on a GPU; GPU="step attention --deadline 540" selects some
	@found=$$($(PYTHON) -c "import torch; print('torch', torch.__version__)" 2>/dev/null) || found="no torch"; \
	  case "$$found" in "torch 2.1"[1-5].*) ;; *) echo "make: $(PYTHON) has $$found, but 2.11 to 2.15 is needed; select" \
	  "another one: make gpu PYTHON=..."; exit 1 ;; esac
	@test ! -d $(BUNDLE)/wheels || reason=$$($(PYTHON) -m pip install -qqq --no-index --no-deps --upgrade \
	  --find-links $(BUNDLE)/wheels --target $(BUNDLE)/site $(GPU_WHEELS) 2>&1) || { case "$$reason" in \
	  *"No space left"*) echo "make: no space is left to install $(BUNDLE)/wheels into $(BUNDLE)/site; free 40 MB" ;; \
	  *) echo "make: cannot install $(BUNDLE)/wheels for $$($(PYTHON) --version): $${reason##*ERROR: }; run make" \
	  "gpu-bundle GPU_PYTHON=..." ;; esac; exit 1; }
	PYTHONPATH=src:$(BUNDLE)/site $(PYTHON) -m benchmarks.gpu $(GPU)

gpu-toy: $(BUNDLE)/shards/manifest.json ## run the measurements of `make gpu` on the CPU at a toy size
	PYTHONPATH=src $(RUN) -m benchmarks.gpu --toy $(GPU)

clean: ## remove the virtual environment and caches; data and logs stay
	rm -rf $(VENV) site site-src dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
