# Two commands for a fresh machine: `make serve` (the main job on the CPU) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Modules are compiled once, not in every process: without it a rank's imports take thrice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve test interpreted together alone test-long test-gpu lint verify clean
.NOTPARALLEL:

# Sets of packages in one .venv: what serving needs, with it what tests of kernels in Triton's
# interpreter need, and with these what all tests need.
SETUP := pyproject.toml scripts/setup.sh
setup: $(VENV)/.tests

$(VENV)/.serving: $(SETUP)
	@PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV) serve
	@touch $@

$(VENV)/.interpreted: $(SETUP)
	@PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV) interpreted
	@touch $(VENV)/.serving $@

$(VENV)/.tests: $(SETUP)
	@PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV) test
	@touch $(VENV)/.serving $(VENV)/.interpreted $@

# The model is fetched once, into models/smollm2.
serve: $(VENV)/.serving
	@PYTHON=$(PYTHON) bash scripts/demo.sh $(BIN)

# Three runs: kernels in Triton's interpreter, in as many processes as there are cores; tests that
# bear company, in WORKERS processes of one thread, a file's in one of them for its fixtures; then,
# one by one, those with time limits. Each runs also after one that failed. Twice as many WORKERS as
# there are cores, as many wait for processes.
WORKERS ?= 4
SPEED := not slow
SLOWEST := --durations=20 --durations-min=5
PYTEST := $(BIN)/python -m pytest -q $(SLOWEST)
ALONE = $$(grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)

# What pip loads and unpacks leaves a core idle: kernels in the interpreter, which want few packages,
# are run beside the rest of a first setup and give way to it.
test: $(VENV)/.interpreted
	@$(MAKE) setup >$(VENV)/.log 2>&1 & rest=$$!; failed=; \
	nice $(MAKE) interpreted || failed=1; \
	wait $$rest || { cat $(VENV)/.log && exit 1; }; \
	$(MAKE) --keep-going together alone && test -z "$$failed"

interpreted:
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist worksteal \
	  -m "($(SPEED)) and interpreted" tests/kernels/interpreted

together:
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --ignore tests/gpu --ignore tests/kernels/interpreted \
	  -m "($(SPEED)) and not interpreted and not gpu and not alone"

alone:
	$(PYTEST) -m "($(SPEED)) and alone" $(ALONE)

test-long:
	$(MAKE) test SPEED="slow or not slow"

# On a machine with a GPU: bits and accuracy of the kernels and of the whole engine, then times.
# Times run also after checks that failed. RESULTS=docs/results appends the rows of the checks there.
GPU_TIMES := gemm attention prefill decode columns sampling
RESULTS ?=

test-gpu: setup
	failed=; \
	$(PYTEST) -m gpu -o timeout=1300 tests/gpu $(if $(RESULTS),--results $(RESULTS)) || \
	  failed=" bits"; \
	for program in $(GPU_TIMES); do \
	  $(BIN)/python -m scripts.gpu_times.kernels.$$program || failed="$$failed $$program"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

verify: $(VENV)/.serving
	$(BIN)/tpdet verify

clean:
	rm -rf $(VENV) models run
