# Everything runs in .venv, made on first use from the pinned requirements and brought up to date when they change.
# Another Python: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
SPECULATOR := demo/SmolLM2-135M-Instruct-speculator.eagle3
TARGET := demo/SmolLM2-135M-Instruct

.PHONY: help demo bench test test-real lint

help:
	@echo "make demo       run a small EAGLE-3 speculator next to plain decoding"
	@echo "make bench      how fast that is, and how near to what this machine's memory allows"
	@echo "make test       the tests that need nothing but this folder"
	@echo "make test-real  the tests on the demo's real pair of models"
	@echo "make lint       ruff: rules and format"

demo: .venv/installed $(TARGET)
	$(VENV_PYTHON) generate.py --speculator $(SPECULATOR) --target $(TARGET) --prompt "Why is the sky blue?" --baseline

bench: .venv/installed $(TARGET)
	$(VENV_PYTHON) -m bench.run --speculator $(SPECULATOR) --target $(TARGET)

test: .venv/installed-dev
	$(VENV_PYTHON) -m pytest -m "not real"

test-real: .venv/installed-dev $(TARGET)
	$(VENV_PYTHON) -m pytest -m real

lint: .venv/installed-dev
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

# The folder appears only when it is complete, so that it needs no stamp.
$(TARGET): | .venv/installed
	@$(VENV_PYTHON) -m scripts.demo_target --out $@

.venv/installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'error: PYTHON: needs 3.10 or newer; try: make PYTHON=python3.12')"
	@echo "Installing $< into .venv (once; a minute or more, nearly all of it torch)"
	@$(PYTHON) -m venv .venv
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	@echo "Installing $< into .venv (once; most of it Triton, 0.7 GB)"
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
