# Every target sets up what it needs in .venv: a machine with Python, gcc and a package index is enough.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test native-test lint format bench clean

demo: $(READY)
	$(BIN)/phalanx run -n 2 examples/digits.py

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

# The engine's own tests, under the sanitizers that fit together.
native-test: $(READY)
	$(call native-tests,thread)
	$(call native-tests,address$(comma)undefined)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

comma := ,
define native-tests
	$(BIN)/cmake -S native/tests -B build/tests-$(firstword $(subst $(comma), ,$(1))) -DSANITIZE=$(1) > /dev/null
	$(BIN)/cmake --build build/tests-$(firstword $(subst $(comma), ,$(1))) --parallel 2 > /dev/null
	build/tests-$(firstword $(subst $(comma), ,$(1)))/reduce_test
	build/tests-$(firstword $(subst $(comma), ,$(1)))/engine_test
endef

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,test,lint]'
	touch $@
