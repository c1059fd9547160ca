# make test    all that must hold before a change goes in; a bare Debian or Ubuntu is first given what it lacks
# make demo    the agent on a simulated prover and GPU
# make dashboards  grafana/dashboards/, from the programs that draw them
# make format  the layout that `make test` asks for
# make clean   back to the sources

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
BIN := .venv/bin
# Its time is that of the last installation into .venv.
INSTALLED := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: test demo dashboards format clean tools

test: $(INSTALLED) tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest

demo: $(INSTALLED)
	$(BIN)/cuzk-agent demo

dashboards: $(INSTALLED)
	PYTHONPATH=grafana $(BIN)/python -m cuzk_dashboards

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find agent tests grafana -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): requirements-test.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { $(call apt_install,python3-venv); }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-test.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# What the tests run besides Python. Debian's prometheus brings a service along, which nobody here asked for.
TOOLS := prometheus promtool logrotate journalctl systemd-analyze /lib/systemd/systemd-journal-remote
PACKAGES := prometheus logrotate systemd systemd-journal-remote

tools:
	@[ $$(command -v $(TOOLS) | wc -l) = $(words $(TOOLS)) ] || { $(call apt_install,$(PACKAGES)); \
	  if [ -d /run/systemd/system ]; then $(as_root) systemctl disable --now prometheus; \
	  else $(as_root) service prometheus stop >/dev/null 2>&1 || true; fi; }
	@command -v chromium >/dev/null || { $(call apt_install,chromium); } || \
	  echo "no Chromium to be had here (Ubuntu's comes as a snap): the tests of what a browser shows will be skipped" >&2

as_root = $(if $(filter 0,$(shell id -u)),,sudo)
apt_install = command -v apt-get >/dev/null || { echo "needed, and no apt-get to install it: $(1)" >&2; exit 1; }; \
  $(as_root) apt-get update -qq && \
  $(as_root) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1)
