# Commands for a fresh clone: each sets up .venv from requirements.txt first, where that is due.

# A file's tests share what they compiled and ran, so they stay on one worker.
PYTEST = python -m pytest -n logical --maxprocesses 8 --dist loadfile

.PHONY: help train test test-all test-nightly test-lowest peers lint typecheck lock

help:
	@echo "make train      train the tiny GPT on the bundled novels; a second time it continues"
	@echo "make test       the tests"
	@echo "make test-all   the long tests too, then the tests with the lowest supported versions"
	@echo "make test-nightly  2,000 drawn combinations through the kernels, others every time"
	@echo "make peers      set up .venv-peers, for the benchmarks that compare with other kernels"
	@echo "make lint       ruff: lint and format"
	@echo "make typecheck  pyright"
	@echo "make lock       resolve the pinned versions anew from pyproject.toml"
	@echo ""
	@echo 'ARGS are passed on: make train ARGS="--help", make test ARGS="-k causal".'
	@echo "The first command sets up .venv, with the Python (3.12 or later) that it finds, or with"
	@echo "PYTHON=/path/to/python."

train: .venv/installed
	@.venv/bin/python -m train $(ARGS)

test: .venv/installed
	.venv/bin/$(PYTEST) -m "not slow" $(ARGS)

test-all: .venv/installed
	.venv/bin/$(PYTEST) $(ARGS)
	@if PYTHON= sh scripts/find_python.sh 3.12 >/dev/null; then \
	    $(MAKE) test-lowest; \
	else \
	    echo "SKIPPED: the lowest supported versions, which are tested with Python 3.12"; \
	fi

test-nightly: .venv/installed
	.venv/bin/$(PYTEST) tests/test_flash_drawn.py tests/test_flash_drawn_bfloat16.py \
	    --hypothesis-profile nightly --hypothesis-show-statistics $(ARGS)

test-lowest: .venv-lowest/installed
	.venv-lowest/bin/$(PYTEST) -m "not slow" $(ARGS)

peers: .venv-peers/installed

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

typecheck: .venv/installed
	.venv/bin/pyright --pythonpath .venv/bin/python

.venv/installed: requirements.txt
	@python=$$(sh scripts/find_python.sh) && \
	echo "Setting up .venv with $$("$$python" --version): some minutes, 1.7 GB on disk" && \
	"$$python" -m venv .venv
	@.venv/bin/python -m pip install --quiet --requirement requirements.txt
	@.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.venv-lowest/installed: requirements-lowest.txt
	@python=$$(PYTHON= sh scripts/find_python.sh 3.12) && \
	echo "Setting up .venv-lowest with $$("$$python" --version)" && \
	"$$python" -m venv .venv-lowest
	@.venv-lowest/bin/python -m pip install --quiet --requirement requirements-lowest.txt
	@.venv-lowest/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# The package is not installed there: `python -m benchmarks.…` finds it in the working directory.
.venv-peers/installed: requirements-peers.txt
	@python=$$(sh scripts/find_python.sh) && \
	echo "Setting up .venv-peers with $$("$$python" --version)" && \
	"$$python" -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --requirement requirements-peers.txt
	@touch $@

# uv resolves for all platforms and Python versions at once, which pip cannot.
LOCK = .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.12 --no-header \
    --no-annotate --no-emit-index-url --no-emit-find-links pyproject.toml --extra tpu

lock:
	python=$$(sh scripts/find_python.sh) && "$$python" -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	$(LOCK) --extra train --extra dev --upgrade --output-file requirements.txt
	printf 'jax==0.11.2\nflax==0.12.12\n' | $(LOCK) --extra train --extra dev --upgrade \
	    --constraints - --output-file requirements-lowest.txt
	$(LOCK) --extra peers --upgrade --constraints requirements.txt \
	    --output-file requirements-peers.txt
