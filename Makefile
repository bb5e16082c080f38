# `make demo` and `make test` need only python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test bench breadth study lint clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --editable ".[dev]"
	touch $@

# The main job end to end: rows sampled, filtered, measured on the virtual GPU and counted; a network printed as a script.
demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/vramcast build family=mlp n=60 out=runs/demo/mlp
	$(BIN)/vramcast build family=cnn n=40 out=runs/demo/cnn
	$(BIN)/vramcast build family=transformer n=8 out=runs/demo/transformer
	$(BIN)/vramcast build family=template sampler=tbem n=20 out=runs/demo/template
	$(BIN)/vramcast build status runs/demo/cnn
	$(BIN)/vramcast build view runs/demo/cnn runs/demo/cnn.csv
	$(BIN)/vramcast build layers 'gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out'
	$(BIN)/vramcast build emit 'gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out' -o runs/demo/row.py
	$(BIN)/python runs/demo/row.py --epochs 1

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --numprocesses 2 --dist worksteal

bench: $(STAMP)
	$(BIN)/python -m benchmarks.build_rate
	$(BIN)/python -W ignore -m benchmarks.trace_speed
	$(BIN)/python -m benchmarks.cold_start
	$(BIN)/python -m benchmarks.inference
	$(BIN)/python -m benchmarks.simulator_scale
	$(BIN)/python -m benchmarks.service_load

# Hundreds of known networks, each classified: half an hour, kept in runs/breadth, taken up again where it was stopped.
breadth: $(STAMP)
	$(BIN)/python -W ignore -m benchmarks.breadth

# Tables and pictures of docs/study.md, from the public tables in DATA: hours, kept in runs/study, taken up again.
DATA ?= $(or $(VRAMCAST_DATA),data)
STUDY = $(BIN)/python -W ignore -m benchmarks.$(1) --data $(DATA) --page docs/study.md --picture docs/study_$(1).png

study: $(STAMP)
	$(call STUDY,staircase)
	$(call STUDY,projections)
	$(call STUDY,regression)
	$(call STUDY,ablation)
	$(call STUDY,sampling_curves)

# Mends what can be mended by a program, and says the rest.
lint: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) runs build dist *.egg-info
