# Two commands for a fresh machine: `make serve` (the main job on the CPU) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/demo

.PHONY: setup serve test test-long test-gpu lint verify clean

setup: $(VENV)/.ready

# torch goes in first and by itself: an open requirement would pull gigabytes of CUDA packages.
$(VENV)/.ready: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV)
	touch $@

$(MODEL): | setup
	$(BIN)/tpdet make-model $(MODEL) --like qwen3

serve: setup $(MODEL)
	bash scripts/demo.sh $(BIN)

test: setup
	$(BIN)/python -m pytest -q

test-long: setup
	$(BIN)/python -m pytest -q -m "slow or not slow"

# On a machine with a GPU: bits, accuracy and times of the kernels, then of the whole engine.
test-gpu: setup
	$(BIN)/python -m tests.gpu.gemm
	$(BIN)/python -m tests.gpu.attention
	$(BIN)/python -m tests.gpu.engine

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

verify: setup
	$(BIN)/tpdet verify

clean:
	rm -rf $(VENV) models run
