# `make demo` and `make test` need only Python 3.11+ (with venv and pip), git and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FLOWER := .venv-flower
# Modules are compiled to bytecode when they are first imported: most of them never are.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Extras for `make demo`: EXTRA=cuda installs JAX for NVIDIA's GPUs, EXTRA=tpu for TPUs.
EXTRA ?=
# The tests run with the versions that they were last seen green with.
CONSTRAINTS ?= tests/constraints.txt
CONSTRAINTS_FLOWER ?= tests/constraints_flower.txt

.PHONY: demo test quick exhaustive portable proof flower docs dist fuzz lint mutants coverage clean

# A .venv stays if its Python is new enough, and the one that `make PYTHON=...` asks for, if any.
version = $(shell $(1) -c 'import sys; v = sys.version_info; \
	print("%s%d.%d" % ("" if v >= (3, 11) else "Python-", v[0], v[1]))' 2>/dev/null)
ifneq ($(MAKECMDGOALS),clean)
WANTED := $(call version,$(PYTHON))
FOUND := $(call version,$(BIN)/python)
KEPT := $(filter $(if $(filter file,$(origin PYTHON)),%,$(WANTED)),$(filter 3.%,$(FOUND)))
ifeq ($(KEPT),)
ifeq ($(filter 3.%,$(WANTED)),)
$(error fedjax_peft needs Python 3.11 or newer. `$(PYTHON)` is $(or $(subst -, ,$(WANTED)),not there). \
	Name another one, such as: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12)
endif
$(shell rm -rf $(VENV))
endif
endif

ifneq ($(filter-out cuda tpu,$(EXTRA)),)
$(error EXTRA=$(EXTRA) is none of the builds of JAX for `make demo`: cuda, tpu)
endif
BASE := $(VENV)/.base$(EXTRA:%=-%)

demo: $(BASE)
	$(BIN)/fedjax-peft demo

# Each worker and each process that a test starts would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PYTEST  := $(BIN)/python -m pytest $(WORKERS)
PYTEST_FLOWER := $(FLOWER)/bin/python -m pytest -n 0 -o file_seconds=0 tests/deploy/test_deploy_processes.py

test: $(VENV)/.test $(FLOWER)/.test lint
	$(PYTEST)
	$(PYTEST_FLOWER)

# The tests to run after every change: neither those marked slow nor those that need a real model.
quick: $(VENV)/.test
	$(PYTEST) -m "not slow and not assets"

# The cases of full products that `make test` leaves out, before a release. The file
# tests/tools/exhaustive.txt has the result of the last time.
exhaustive: $(VENV)/.test
	$(PYTEST) --exhaustive -m exhaustive -o file_seconds=0

# The numeric tests as other processors would run them, and what comes near its tolerance. The file
# tests/tools/portable.txt has the result of the last time.
portable: $(VENV)/.test
	$(BIN)/python tests/tools/portable.py

# Whole runs drawn at random, and what must be equal about them: an hour, or PROOF_SECONDS=20000. The
# file tests/proof/proof.txt has the result of the last time. Others: PROOF="--seed 2 --devices".
proof: $(VENV)/.test
	nice $(BIN)/python tests/proof/machine.py --seconds $${PROOF_SECONDS:-3600} $(PROOF)

# The test with Flower's processes, with which `make test` ends, and one in which they are killed.
flower: $(FLOWER)/.test
	$(PYTEST_FLOWER) --exhaustive

# The documentation site; a warning, such as a broken link, is an error, in `make test` too.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo Open docs/_build/html/index.html

# The wheel and the source distribution in dist/, after the wheel was installed and used alone.
dist: $(VENV)/.test
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[dist]'
	$(BIN)/python tests/tools/dist.py

# New hostile inputs for every fuzzer, some hours of them with FUZZ_EXAMPLES=100000.
fuzz: $(VENV)/.test
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-2000} $(BIN)/python -m pytest tests/fuzz --timeout 0

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# An environment that `uv venv` made has no pip.
$(VENV)/bin/pip: | $(VENV)/bin/python
	@test -e $@ || $(BIN)/python -m ensurepip --default-pip >$(VENV)/pip.log

$(BASE): pyproject.toml | $(VENV)/bin/pip
	@echo "Installing fedjax_peft and its libraries (JAX$(EXTRA:%=[%]), Flax, Transformers ...): about 1 GB, some quiet minutes"
	@$(PIP) --editable '.$(EXTRA:%=[%])'
	@touch $@

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/pip
	@echo "Installing fedjax_peft and the tools of its documentation"
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/pip
	@echo "Installing PyTorch, whose models are the reference (1 of 3)"
	@$(PIP) --constraint $(CONSTRAINTS) torch==2.13.0
	@echo "Installing fedjax_peft and its libraries (2 of 3)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable .
	@echo "Installing what the tests compare with, and the tools (3 of 3)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[test]'
	@touch $@ $(VENV)/.base $(VENV)/.docs

# Flower allows older versions of some libraries only. An environment of its own has these, and takes
# all else from .venv, but not torch: real clients have none, and transformers would import it.
$(FLOWER)/.test: pyproject.toml $(CONSTRAINTS_FLOWER) $(VENV)/.test
	@echo "Installing Flower, for the test of real clients, on top of $(VENV)"
	@rm -rf $(FLOWER)
	@$(BIN)/python -m venv --without-pip $(FLOWER)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); \
		print("import sys; sys.modules[\"torch\"] = None")' > $$(echo $(FLOWER)/lib/python3.*/site-packages)/venv.pth
	@PIP_PYTHON=$(FLOWER)/bin/python $(PIP) --constraint $(CONSTRAINTS_FLOWER) --no-build-isolation --editable '.[deploy]'
	@touch $@

# Small faults in the package, which the tests must notice; about 20 minutes. The file
# tests/tools/mutants.txt has the result of a long run.
mutants: $(VENV)/.test
	nice $(BIN)/python tests/tools/mutants.py

# Lines and branches that the tests run, by room. A part: make coverage TESTS=tests/transforms
coverage: $(VENV)/.test
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(WORKERS) -o file_seconds=0 $(TESTS)
	$(BIN)/python tests/tools/coverage_by_room.py

clean:
	rm -rf $(VENV) $(FLOWER) runs dist docs/_build
