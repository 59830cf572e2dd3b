# make sweep, make test: both set up .venv on first use. make check: what CI checks besides. JOBS: tests at a time, each with OMP_NUM_THREADS threads.
PYTHON ?= python3
BIN := .venv/bin
# --no-compile: Python compiles what it imports, a small part of what is installed
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-compile
export OMP_NUM_THREADS ?= 1
# where the environment forbids Python to keep what it compiles (containers do), every process of a sweep and of the
# tests would compile all that it imports anew: Ray's workers twice as long as they import
unexport PYTHONDONTWRITEBYTECODE
CORES := $(shell getconf _NPROCESSORS_ONLN)
# no more threads than cores; each of the jobs first reads all tests, so more than 4 save nothing
JOBS ?= $(shell jobs=$$(( $(CORES) / $(OMP_NUM_THREADS) )); echo $$(( jobs < 1 ? 1 : jobs > 4 ? 4 : jobs )))

.PHONY: sweep test rounding slow check docs benchmarks clean

sweep: .venv/runnable
	$(BIN)/python -m stability.sweep $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

rounding: .venv/installed  # the numeric tests as other processors round; ARGS: paths of tests, --settings
	$(BIN)/python -m tests.rounding --jobs $(JOBS) $(ARGS)

slow: .venv/installed
	$(BIN)/python -m pytest -m slow $(ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

benchmarks: .venv/installed
	$(BIN)/python -m benchmarks.mechanisms
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m pip install --quiet --constraint constraints.txt '.[peers]'
	$(BIN)/python -m benchmarks.curvature
	$(BIN)/python -m benchmarks.jet

# what a sweep needs; what the tests need beside it is half as much again, which nobody should wait for who only wants to sweep
.venv/runnable: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	touch $@

.venv/installed: .venv/runnable
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
