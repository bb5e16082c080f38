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

# The whole way once, small: rows are made, an estimator learns from them, and a known network is classified.
SAY = @printf '\n\033[1m%s\033[0m\n'
demo: $(STAMP)
	@rm -rf runs/demo
	$(SAY) '1. Rows: networks are drawn, checked, and put on a virtual GPU. Every figure is simulated.'
	$(BIN)/vramcast build family=mlp n=120 out=runs/demo/mlp
	$(BIN)/vramcast build family=cnn n=60 out=runs/demo/cnn
	$(BIN)/vramcast build family=template sampler=tbem n=80 out=runs/demo/template
	$(SAY) '2. Training: an ensemble learns from layer tables alone; judged on a quarter of the simulated rows.'
	$(BIN)/python -m train 'data.builds=[runs/demo/mlp,runs/demo/cnn,runs/demo/template]' trainer.epochs=100 risk=0.1 \
	    'split={train: 0.65, validation: 0.1, test: 0.25}' run.root=runs/demo run.name=run
	$(SAY) '3. A known network, by the released checkpoint "universal".'
	$(BIN)/vramcast classify timm:resnet50 --batch-size 64 --device rtx_3060 --plot runs/demo/resnet50.png
	$(SAY) 'The picture of it, its memory over seven training steps (simulated): runs/demo/resnet50.png'

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --numprocesses 2 --dist worksteal

# What estimators are worth and what they cost; the tables and pictures of the documentation. Tens of minutes on two cores.
# The public measurements are found in VRAMCAST_DATA; without them the comparison with the field says so, and the rest runs.
bench: export OMP_NUM_THREADS := 1
bench: export VRAMCAST_DATA := $(or $(VRAMCAST_DATA),../shared/data)
bench: $(STAMP)
	$(BIN)/python -W ignore -m benchmarks.field
	$(BIN)/python -W ignore -m benchmarks.performance.growth
	$(BIN)/python -m benchmarks.performance.build_rate
	$(BIN)/python -W ignore -m benchmarks.performance.trace_speed
	$(BIN)/python -m benchmarks.performance.cold_start
	$(BIN)/python -m benchmarks.performance.inference
	$(BIN)/python -m benchmarks.performance.simulator_scale
	$(BIN)/python -m benchmarks.performance.service_load

# Hundreds of known networks, each classified: half an hour, kept in runs/breadth, taken up again where it was stopped.
breadth: $(STAMP)
	$(BIN)/python -W ignore -m benchmarks.breadth

# Tables and pictures of docs/study.md, from the public tables in DATA: hours, kept in runs/study, taken up again.
DATA ?= $(or $(VRAMCAST_DATA),data)
STUDY = $(BIN)/python -W ignore -m benchmarks.study.$(1) --data $(DATA) --page docs/study.md --picture docs/study_$(1).png

study: $(STAMP)
	$(call STUDY,staircase)
	$(call STUDY,projections)
	$(call STUDY,regression)
	$(BIN)/python -W ignore -m benchmarks.study.vgg_depth --page docs/study.md --picture docs/study_vgg_depth.png
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
