# Builds mpkernels and tries it: in the virtual environment that is active, which keeps its torch; else in .venv, with
# the torch that TORCH names. On Linux PyPI's brings CUDA, in several GB, so a machine without a GPU gets torch's own.
TORCH ?= torch==2.13.0
has_gpu ?= $(shell command -v nvidia-smi || ls -d /dev/nvidiactl /dev/kfd 2>/dev/null)
cpu_index := --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 20
ifdef VIRTUAL_ENV
python := $(VIRTUAL_ENV)/bin/python
else
python := .venv/bin/python
endif

help: ## list what can be made
	@sed -n 's/^\([a-z]*\):[^#]*## /make \1: /p' Makefile

demo: environment ## build the kernels, train a small model in four ways, draw the picture
	$(python) -m pip install -v -e '.[demo]'
	$(python) -m mpkernels demo

test: environment ## build the kernels, compare each with its reference; make test ARGS=--all runs every test
	$(python) -m pip install -v -e '.[test]'
	$(python) -m pytest -n auto --dist loadfile --require=cpu-reference,cpu-native,cpu-triton,cpu-cuda $(ARGS)

environment:
ifndef VIRTUAL_ENV
	python3 -m venv .venv
	$(if $(has_gpu),,$(python) -m pip install $(cpu_index) '$(TORCH)' ||) $(python) -m pip install '$(TORCH)'
endif

.PHONY: help demo test environment
