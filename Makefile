# Everything runs in a virtual environment of this clone: .venv, made on first use with the pinned versions of
# constraints.txt. `make run` and `make test` are all that a new user needs.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PROMPT ?= Why is the sky blue?
MINUTES ?= 60

# A waiting OpenMP thread that spins takes the core that another one needs.
export OMP_WAIT_POLICY ?= passive

.PHONY: run test test-all lint types sanitize fuzz check clean

run: $(VENV)/runtime  ## fetch the default model once, answer a prompt with speculation, compare with plain decoding
	$(BIN)/ppsd-run --compare --max-tokens 128 "$(PROMPT)"

# Tests need neither a GPU nor a network, beyond package installs and the default model's.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/development  ## tests of every part, in minutes
	$(BIN)/ppsd-run pull
	$(PYTEST) -m "not slow"

test-all: $(VENV)/development  ## these, and those marked slow
	$(BIN)/ppsd-run pull
	$(PYTEST)

lint: $(VENV)/development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not see through an editable install, so it gets the packages as they will be installed.
types: $(VENV)/development
	@rm -rf build/types && mkdir -p build/types/ppsd_rt
	@ln -s $(CURDIR)/ppsd_rt/* build/types/ppsd_rt/
	@ln -s $(CURDIR)/models $(CURDIR)/triton_kernels build/types/ppsd_rt/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p ppsd_rt

sanitize: $(VENV)/development  ## the C++ carriers and the CPU library under stress, under each sanitizer
	PATH="$(abspath $(BIN)):$$PATH" csrc/tests/sanitize.sh

fuzz: $(VENV)/development  ## damaged input of every kind for MINUTES; what is found goes to build/fuzz
	@mkdir -p build
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --minutes $(MINUTES) --out build/fuzz.json

check: lint types test-all

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The marker files say which set-up has been done; a change of the pins, the build or the C++ sources repeats it.
$(VENV)/runtime: $(VENV)/bin/python pyproject.toml setup.py constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# What the extras name, without the package: another editable install would compile it again.
EXTRAS := import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
          print(*extras["dev"], *extras["hub"], sep="\n")

$(VENV)/development: $(VENV)/runtime
	$(BIN)/python -c '$(EXTRAS)' >$@.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement $@.txt
	@touch $@
