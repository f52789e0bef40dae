# Every target sets up what it needs in .venv: a machine with Python, gcc and a package index is enough.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
INTEROP := .venv-interop
PEERS   := benchmarks/peers/.venv

# Some environments, such as those of containers, turn bytecode files off. The tests start a hundred interpreters that
# would compile the package again, and every test process would rewrite the assertions of all test files.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow native-test soak interop lint format bench peers clean

demo: $(READY)
	$(BIN)/phalanx run -n 2 examples/digits.py

# On three processes, for two cores: much of the time goes into waiting, for deadlines and for peers. The
# files that take longest come first (tests/conftest.py), and not those that have most tests.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

# Whole programs, compilers and random kills: what takes seconds each.
test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

# The engine's own tests, under the sanitizers that fit together.
native-test: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" native/tests/run thread
	PATH="$(abspath $(BIN)):$$PATH" native/tests/run address,undefined

# What is rare is found by trying often: kills at random instants, files with random damage, random
# training programs, elastic runs with 1,200 failures.
soak: $(READY)
	PHALANX_SOAK=1 $(BIN)/python -m pytest -n 2 --timeout 3600 tests/checkpoint/test_kills.py tests/checkpoint/test_async_deaths.py tests/checkpoint/test_hostile.py tests/ddp/test_fuzz.py $(ARGS)
	PHALANX_SOAK=1 $(BIN)/python -m pytest -n 3 -rP tests/elastic/test_chaos.py -k soak $(ARGS)

# Other people's programs, unmodified: torchrun and Gloo, `phalanx run`, and drop-in, side by side. Brings the
# tables in docs/integrations.md up to date.
interop: $(INTEROP)/.ready
	$(INTEROP)/bin/python tools/upstream_uses.py accelerate lightning transformers
	$(INTEROP)/bin/python -m interop $(or $(ARGS),--speed 24 --docs docs/integrations.md)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Prints tables, keeps every sample, and brings the figures and the picture in docs/ up to date.
bench: $(READY)
	$(BIN)/python -m benchmarks $(or $(ARGS),--json benchmarks/results/latest.json --docs docs)

# The environment of systems that benchmarks.recovery compares with.
peers: $(PEERS)/.ready

clean:
	rm -rf $(VENV) $(INTEROP) $(PEERS) build dist .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,test,lint,native,bench]'
	touch $@

# An environment of its own, since frameworks pin what they need. If the index lacks a package, nothing was tested.
$(INTEROP)/.ready: interop/requirements.txt pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --constraint constraints.txt --requirement interop/requirements.txt \
	  --editable . || { echo "make interop: cannot install what interop/requirements.txt pins, see the error of pip" \
	  "above; no program was run" >&2; exit 1; }
	touch $@

# If the index lacks a package, benchmarks.recovery leaves out what needs it and says so.
$(PEERS)/.ready: benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement benchmarks/peers/requirements.txt
	touch $@
