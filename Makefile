# Everything runs in a virtual environment of this clone: .venv, made on first use with the pinned versions of
# constraints.txt. `make run` and `make test` are all that a new user needs.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PROMPT ?= Why is the sky blue?
MINUTES ?= 60
SEEDS ?= 1000

# A waiting OpenMP thread that spins takes the core that another one needs.
export OMP_WAIT_POLICY ?= passive
# Images of containers set it; then every process that a test starts compiles all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run quick test test-slow test-all clients lint types tidy sanitize fuzz virtual-gpu wheel check clean

run: $(VENV)/runtime  ## fetch the default model once, answer a prompt, then compare with plain decoding in turns
	@echo "[4/4] answering with the default model"
	@command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && echo "This machine has a GPU. The cuda backend has run on one H200 only; to try it: pip install '.[cuda]', then ppsd-run --backend cuda. This answer takes the CPU." || true
	@$(BIN)/ppsd-run --backend cpu --max-tokens 128 "$(PROMPT)"
	@echo "Three short prompts, with drafts and plainly in turns:"
	@printf '%s\n' "What is a volcano?" "Write a Python function that reverses a list." "List the planets of the solar system." \
	  | $(BIN)/ppsd-run --backend cpu --max-tokens 48 --compare --prompts - >/dev/null
	@echo "Go on: $(BIN)/ppsd-run --chat"

# Tests need neither a GPU nor a network, beyond package installs and the default model's.
# schemathesis is called; as a plugin it takes seconds to start.
# Asserts of tests are rewritten, and what processes import is compiled, once: also where the environment forbids that.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p no:schemathesis -n auto --dist worksteal

quick: $(VENV)/quick  ## what a developer runs after each change, in under a minute; needs no torch
	$(PYTEST) -q -m "not slow" $$(cat tests/quick.txt)

test: $(VENV)/development  ## tests of every part, in minutes
	$(BIN)/ppsd-run pull
	$(PYTEST) -m "not slow" --durations 10

test-slow: $(VENV)/development  ## those marked slow: what they prove in depth has a faster neighbour in `make test`
	$(BIN)/ppsd-run pull
	$(PYTEST) -m slow --durations 10

test-all: test test-slow  ## before a release; .ci/passed.txt says when it was run last
	-.ci/passed test-all

clients: $(VENV)/development  ## real clients against the server, in an environment of their own under build/clients
	tests/clients/run.sh "$(abspath $(BIN))/ppsd-run"

lint: $(VENV)/development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/lines

# mypy does not see through an editable install, so it gets the packages as they will be installed.
types: $(VENV)/development
	@rm -rf build/types && mkdir -p build/types/ppsd_rt
	@cd build/types/ppsd_rt && ln -s ../../../ppsd_rt/* ../../../models ../../../triton_kernels .
	cd build/types && "$(abspath $(BIN))/mypy" --config-file ../../pyproject.toml -p ppsd_rt

$(BIN)/clang-tidy: | $(VENV)/development
	$(BIN)/pip install --quiet clang-tidy==23.1.4

# GCC's precompiled headers say nothing to Clang, which has other warnings than those that -Werror is for.
tidy: $(BIN)/clang-tidy  ## clang-tidy on csrc or FILES of it, as .clang-tidy says; minutes
	PATH="$(abspath $(BIN)):$$PATH" CXXFLAGS= cmake -S . -B build/tidy -DPPSD_MODULE=OFF \
	  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	$(BIN)/run-clang-tidy.py -clang-tidy-binary $(BIN)/clang-tidy -p build/tidy -quiet $(FILES)
	-$(if $(FILES),,.ci/passed tidy)

sanitize: $(VENV)/development  ## the C++ carriers and the CPU library under stress, under each sanitizer
	PATH="$(abspath $(BIN)):$$PATH" csrc/tests/sanitize.sh $(SANITIZE)
	-$(if $(SANITIZE),,.ci/passed sanitize)

fuzz: $(VENV)/development  ## damaged input of every kind for MINUTES; what is found goes to build/fuzz. Then random schedules
	@mkdir -p build
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --minutes $(MINUTES)
	PATH="$(abspath $(BIN)):$$PATH" csrc/tests/sanitize.sh $$(($(MINUTES) * 6)) $$(date +%s) address,undefined

virtual-gpu: $(VENV)/development  ## answers on an executor of PTX, in SEEDS random orders; every fault put in is found
	$(BIN)/python tests/virtual_gpu/campaign.py --seeds $(SEEDS)

# Of this interpreter and processor, for every Linux whose C library is as new as the tag says.
wheel: $(VENV)/development  ## a wheel that runs elsewhere, in dist/
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

check: lint types tidy sanitize clients test-all  ## all of it, before a release

clean:
	rm -rf $(VENV) build dist *.egg-info

# The marker files say which set-up has been done; a change of the pins, the build or the C++ sources repeats it.
# What builds the extension is installed first and stays: in an environment of its own for every build, pip would have
# all of it compiled again. To run, the kernels of this machine are enough; tests need all, and a module of their own.
BUILD   := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
SOURCES := pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
EXTRAS  := .[all,dev]
# Of what pip says, the files that take long to come are shown.
install = { $(BIN)/pip --disable-pip-version-check install --constraint constraints.txt $(1) || echo failed; } | awk '/ Downloading .*\([0-9.]+ [MG]B\)$$/ {print; fflush()} /^Installing/ {print "  installing"; fflush()} /^failed$$/ {exit 1}'

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) on the PATH: install Python 3.11 or newer, or say make PYTHON=/path/to/python3." >&2; exit 1; }
	@$(PYTHON) check_machine.py
	@echo "[1/4] a virtual environment in $(VENV), with the pinned packages"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/packages: $(VENV)/bin/python pyproject.toml constraints.txt
	@$(BIN)/python -c '$(BUILD)' >$@.txt
	@$(call install,--requirement $@.txt)
	@touch $@

$(VENV)/runtime: $(VENV)/packages $(SOURCES)
	@echo "[2/4] compiling the runtime and the kernels of this machine"
	@PPSD_KERNELS=$${PPSD_KERNELS:-native} $(BIN)/python setup.py -q build_ext --inplace
	@echo "[3/4] installing it, with the packages that it needs"
	@export PPSD_KERNELS=$${PPSD_KERNELS:-native}; $(call install,--no-compile --no-build-isolation --editable .)
	@$(BIN)/python setup.py --quiet link_types
	@touch $@

$(VENV)/quick: $(VENV)/runtime
	@PPSD_KERNELS=$${PPSD_KERNELS:-native} PPSD_TESTING=ON $(BIN)/python setup.py -q build_ext --inplace
	@export PPSD_KERNELS=$${PPSD_KERNELS:-native} PPSD_TESTING=ON; $(call install,--no-build-isolation --editable ".[quick]")
	@touch $@

$(VENV)/development: $(VENV)/packages $(SOURCES)
	@echo "installing what tests need; PyPI's torch for Linux brings 3 GB of GPU libraries, of which no test needs any."
	@echo "For the CPU build of torch, 0.2 GB, name its index in PIP_EXTRA_INDEX_URL: docs/guide/install.md has the line."
	@PPSD_KERNELS=all PPSD_TESTING=ON $(BIN)/python setup.py -q build_ext --inplace
	@export PPSD_KERNELS=all PPSD_TESTING=ON; $(call install,--no-build-isolation --editable "$(EXTRAS)")
	@$(BIN)/python setup.py --quiet link_types
	@touch $(VENV)/runtime $(VENV)/quick $@
