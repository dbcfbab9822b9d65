# make setup      a virtual environment with the base packages (no PyTorch)
# make evaluate   compare the built-in policies; writes results/default
# make test       all tests, slow ones too; adds the training and development packages
# make results    measure the published comparisons; writes docs/results.md
# make check      linter, formatter and type checker
# make clean      remove the virtual environment, caches and built packages; results/ and runs/ stay
#
# Needs make and a Python >= 3.10, by default `python3`: make PYTHON=python3.12 setup

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# A stamp is newer than what it was installed from.
BASE := $(VENV)/.stamp-base
FULL := $(VENV)/.stamp-full

.PHONY: setup evaluate test results check clean
.DEFAULT_GOAL := setup

setup: $(BASE)

$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "opal-gym needs Python >= 3.10")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[report]'
	@touch $@

# constraints.txt names the release of PyTorch.
$(FULL): $(BASE) constraints.txt
	$(PIP_INSTALL) -e '.[docs,render,report,train,dev]'
	@touch $@

evaluate: $(BASE)
	$(PY) scripts/evaluate.py --out results/default

# No PyTorch: trained policies decide in NumPy.
results: $(BASE)
	$(PY) scripts/results.py --workers 2

# Two processes, one thread each.
test: $(FULL)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2

check: $(FULL)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy opal_gym agents

clean:
	rm -rf $(VENV) build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
