# Needs Python >= 3.11 and make, nothing else: `make demo` and `make test` build the environment in .venv/ themselves.
# Settings: make env PYTHON=python3.12 | make test VENV=/path/of/an/environment

SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help env demo test test-all test-oldest test-newest lint format smoke soak bench bench-gpu profile gpu docs notebooks \
    changelog dist clean

VENV ?= $(CURDIR)/.venv
override VENV := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))
BIN := $(VENV)/bin
RUN := $(BIN)/python
# Share of the tests that test, test-oldest and test-newest run: 1/1 is all of them, 1/3 the first third.
CASES ?= first
CONFIG := configs/experiment/digits_fedntd.yaml
STAMP := $(VENV)/installed
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.13 python3.12 python3.11 python3 python)

# Nothing is written to the home directory, which may be empty, missing or read-only; what the caller has set stays.
export UV_CACHE_DIR ?= $(VENV)/cache/uv
export PIP_CACHE_DIR ?= $(VENV)/cache/pip
export MPLCONFIGDIR ?= $(VENV)/cache/matplotlib
export XDG_CACHE_HOME ?= $(VENV)/cache
export IPYTHONDIR ?= $(VENV)/cache/ipython
export JUPYTER_CONFIG_DIR ?= $(VENV)/cache/jupyter/config
export JUPYTER_DATA_DIR ?= $(VENV)/cache/jupyter/data
export JUPYTER_RUNTIME_DIR ?= $(VENV)/cache/jupyter/runtime
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# uv, unlike pip, leaves compiling to the first import, which a shell with PYTHONDONTWRITEBYTECODE repeats every time.
export UV_COMPILE_BYTECODE ?= 1
# The tests' nets are tiny: a second thread only waits, and on a busy machine for long.
test test-all test-oldest smoke soak: export OMP_NUM_THREADS ?= 1
# Both workers, and every process that a test starts, read the same files: compiled once, where the shell does not forbid it
# for good (`make clean` takes the compiled files away).
test test-all test-oldest: export PYTHONDONTWRITEBYTECODE :=
# A PYTHONHOME or an environment activated in the caller's shell must not leak into ours.
unexport PYTHONHOME VIRTUAL_ENV

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

# The stamp holds what the environment was made from. Its content counts, not its date: a checkout changes no date here.
env:  ## create .venv/, or bring it up to date; without network when it is
	@made_from() { echo "$(CURDIR)"; cat setup.cfg setup.py pyproject.toml; }; \
	if made_from | cmp -s - '$(STAMP)' && '$(RUN)' -c '' 2>/dev/null; then exit 0; fi; \
	if ! '$(RUN)' -m pip --version >/dev/null 2>&1; then \
	    for candidate in $(CANDIDATES); do \
	        if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	        then found=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo 'make env needs Python >= 3.11 with its venv module; tried:' $(CANDIDATES)'.' \
	            'Install one (Debian: apt install python3 python3-venv) or name it: make env PYTHON=/path/to/python3' >&2; \
	        exit 1; \
	    fi; \
	    if [ '$(VENV)' != '$(CURDIR)/.venv' ] && [ ! -e '$(VENV)/pyvenv.cfg' ] && [ -n "$$(ls -A '$(VENV)' 2>/dev/null)" ]; then \
	        echo 'VENV must name an environment or a new folder, got $(VENV), which holds something else.' >&2; \
	        exit 1; \
	    fi; \
	    echo "creating $(VENV) with $$("$$found" --version)"; \
	    rm -rf '$(VENV)' && "$$found" -m venv '$(VENV)' || exit 1; \
	fi; \
	rm -f '$(STAMP)'; \
	echo 'installing fl_lightning and its tools into $(VENV) (the first time this downloads PyTorch: some minutes)'; \
	'$(RUN)' -m pip install --quiet uv || echo 'uv cannot be had here: pip does the work' >&2; \
	if ! { [ -x '$(BIN)/uv' ] && '$(BIN)/uv' pip install --quiet --python '$(RUN)' -e '.[dev,flower,tensorboard]' 2>/dev/null; }; then \
	    echo 'uv does not get through here: pip installs, which takes longer and would say why' >&2; \
	    '$(RUN)' -m pip install --quiet -e '.[dev,flower,tensorboard]' || exit 1; \
	fi; \
	made_from > '$(STAMP)'

demo: env  ## the main job: FedNTD on real handwritten digits, under a minute
	@'$(BIN)/fl-lightning' fit -c $(CONFIG)
	@folder=$$(ls -td runs/$(basename $(notdir $(CONFIG)))/*/ | head -n 1); \
	printf '%s\n' '' "Next, with '. .venv/bin/activate':" \
	    "  look at          $${folder}classwise.png, partition.png, metrics.csv; tensorboard --logdir runs" \
	    '  another setting  fl-lightning fit -c $(CONFIG) --model.client.beta 0.3' \
	    '  other methods    fl-lightning compare -c $(CONFIG) --methods FedAvg FedNTD --seeds 0 1 2' \
	    '  your own module  README.md, "Your own module and data"'

test: env  ## the short suite: the first case of each test (CASES=all: all cases), without the slow ones
	@'$(RUN)' -m pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu' --cases '$(CASES)'

test-all: env  ## the slow tests too
	@'$(RUN)' -m pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not gpu'

# Wheels only: the oldest versions with a wheel for this Python. On 3.11 and 3.12 these are the bounds of setup.cfg.
test-oldest: env  ## the tests on the oldest Python here, with the oldest versions that setup.cfg admits
	@python='$(PYTHON)'; [ -n "$$python" ] || python=$$('$(RUN)' -m tools.pythons oldest) || exit 1; \
	'$(BIN)/uv' venv --quiet --clear --python "$$python" '$(VENV)/oldest' || exit 1; \
	echo "installing the oldest versions into $(VENV)/oldest with $$('$(VENV)/oldest/bin/python' --version)"
	@'$(BIN)/uv' pip install --quiet --python '$(VENV)/oldest/bin/python' --resolution lowest-direct \
	    --only-binary :all: --no-binary fl-lightning -e '.[dev,tensorboard]'
	@'$(VENV)/oldest/bin/python' -m pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu' \
	    --cases '$(CASES)'

test-newest: env  ## the tests on the newest Python here, unless `make test` runs on it
	@python=$$('$(RUN)' -m tools.pythons newest) || exit 1; \
	version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	if [ "$$version" = "$$('$(RUN)' -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ]; then \
	    echo "the newest Python here is $$version, on which 'make test' runs: nothing more to test"; \
	else \
	    $(MAKE) --no-print-directory test VENV='$(VENV)/python'"$$version" PYTHON="$$python"; \
	fi

lint: env  ## ruff, plain style, mypy --strict, import directions
	@'$(RUN)' -m ruff check .
	@'$(RUN)' -m ruff format --check .
	@'$(RUN)' -m tools.style
	@'$(RUN)' -m ruff check --extend-select PLR0917,FBT003,C4 $$('$(RUN)' -m tools.style --list)
	@'$(RUN)' -m mypy
	@'$(BIN)/lint-imports'

format: env  ## rewrite the files as ruff wants them
	@'$(RUN)' -m ruff check --fix .
	@'$(RUN)' -m ruff format .

smoke: env  ## two rounds of every method's experiment, two over SuperLink, the table of methods, CONTRIBUTING's walk-through
	@'$(RUN)' tests/smoke/smoke_configs.py
	@'$(RUN)' -m pytest -k '(test_methods and not two_rounds) or walk_through or that_it_prints or process_of_its_own or 01_' \
		tests/cli/test_methods.py tests/cli/test_new.py tests/experiments/test_compare.py tests/test_contributing.py tests/test_notebooks.py
	@'$(RUN)' -m pytest -k 'superlink and FedAvg' tests/flower/test_deployed.py

soak: env  ## 200 runs killed at random moments and continued; 5,200 damaged files; 10,000 rounds with faults (an hour)
	@'$(RUN)' -m tests.soak.kills
	@'$(RUN)' -m tests.soak.damage
	@'$(RUN)' -m tests.soak.rounds

bench: env  ## seconds per round against a bare PyTorch loop; writes bench/results/*.csv
	@'$(RUN)' -m bench

bench-gpu: env  ## bare loop, package, stacks and CUDA graphs on a GPU, ten minutes; writes bench/results/gpu.csv
	@'$(RUN)' -m bench.gpu

profile: env  ## where the time of a round of each workload goes, and profile.json for a trace viewer
	@'$(RUN)' -m bench --parts
	@'$(RUN)' -m bench.profile

gpu: env  ## the tests that need a GPU
	@'$(RUN)' -m pytest -m gpu

docs: env  ## the site in site/: quick start, methods, recipes, API
	@'$(RUN)' -c 'import mkdocs, mkdocstrings' 2>/dev/null || { echo 'installing mkdocs'; '$(RUN)' -m pip install --quiet -e '.[docs]'; }
	@PYTHONPATH='$(CURDIR)' NO_MKDOCS_2_WARNING=1 '$(RUN)' -m mkdocs build
	@echo 'site/index.html'

notebooks: env  ## run the notebooks and keep their outputs in them
	@PYTHONPATH='$(CURDIR)' '$(RUN)' tools/refresh_notebooks.py

changelog: env  ## print the next version's changes; VERSION=0.3.0 writes them into CHANGELOG.md
	@'$(RUN)' -m tools.changelog $(VERSION)

dist: env  ## wheel and sdist in dist/
	@'$(RUN)' -m build --no-isolation .

clean:  ## remove .venv/ and what the tools leave behind; run folders stay
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
