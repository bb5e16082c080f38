# `make demo` and `make test` need only python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test slow compat stacks bench soak slurm kube manifests breadth study lint clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --editable ".[dev]"
	touch $@

# The whole path at a small scale: build rows, train an estimator on them, classify a known network.
SAY = @printf '\n\033[1m%s\033[0m\n'
demo: $(STAMP)
	@rm -rf runs/demo
	$(SAY) '1. Build: draw networks, check them, and measure them on a virtual GPU. Every figure is simulated.'
	$(BIN)/vramcast build family=mlp n=120 out=runs/demo/mlp
	$(BIN)/vramcast build family=cnn n=60 out=runs/demo/cnn
	$(BIN)/vramcast build family=template sampler=tbem n=80 out=runs/demo/template
	$(SAY) '2. Train: fit an ensemble to layer tables, and evaluate it on a quarter of the simulated rows.'
	$(BIN)/vramcast train 'data.builds=[runs/demo/mlp,runs/demo/cnn,runs/demo/template]' trainer.epochs=100 risk=0.1 \
	    'split={train: 0.65, validation: 0.1, test: 0.25}' run.root=runs/demo run.name=run
	$(SAY) '3. Classify: a known network, with the released checkpoint "universal".'
	$(BIN)/vramcast classify timm:resnet50 --batch-size 64 --device rtx_3060 --plot runs/demo/resnet50.png
	$(SAY) 'Its memory over seven training steps, simulated: runs/demo/resnet50.png'

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --numprocesses 2 --dist worksteal --reruns 1 -rR -m "not slow"

# The tests that `make test` leaves out for their time: a few minutes.
slow: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m slow

# Networks traced with torch 2.6, 2.9 and the newest, and with transformers 4.51 and the newest. The environments are
# made once, in .venvs: they take 5 GB where no CPU build of an old torch is to be had. The tests of cuDNN run with its
# library, which takes 2 GB.
compat: export OMP_NUM_THREADS := 1
compat: $(STAMP)
	$(BIN)/python tests/compat/run.py
	test -d .venvs/cudnn || $(BIN)/python -m pip install -qq --target .venvs/cudnn nvidia-cudnn-cu12==9.10.2.21
	VRAMCAST_CUDNN=.venvs/cudnn $(BIN)/pytest tests/test_cudnn_library.py

# Environments with the libraries of published fine-tuning runs, in .venvs: some minutes and 600 MB. Those that exist are kept.
stacks: $(STAMP)
	$(BIN)/python -m benchmarks.published.stacks

# The release of transformers that xMem's runs used, without a second torch.
.venvs/xmem: | $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install -qq --no-deps --target $@.part transformers==4.51.3 "tokenizers<0.22" "huggingface-hub<1"
	mv $@.part $@

# Accuracy and cost of estimators; writes tables and pictures of the documentation. Tens of minutes on two cores.
# VRAMCAST_DATA is the directory of the public measurements; without it the comparison with the field is skipped.
bench: export OMP_NUM_THREADS := 1
bench: export VRAMCAST_DATA := $(or $(VRAMCAST_DATA),../shared/data)
bench: $(STAMP) .venvs/xmem
	$(BIN)/pytest benchmarks/tests
	PYTHONPATH=.venvs/xmem $(BIN)/python -W ignore -m benchmarks.field
	$(BIN)/python -W ignore -m benchmarks.performance.growth
	$(BIN)/python -m benchmarks.performance

# Attacks on the service and the cluster simulator, on loopback. Takes an hour or two; resumes from runs/soak.
soak: export OMP_NUM_THREADS := 1
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak

# Slurm's plugins under a live slurmctld, in a minute or two: needs root and `apt-get install slurm-wlm munge curl`, or
# says why it is skipped. Everything is in a temporary folder, on free ports of loopback.
slurm: export OMP_NUM_THREADS := 1
slurm: $(STAMP)
	$(BIN)/pytest benchmarks/clusters/test_slurm_live.py -vv -rs

# Manifests, webhook, claims and extender under a live API server and scheduler, in a minute or two: KUBE_BIN (or envtest's
# KUBEBUILDER_ASSETS) is a folder with etcd, kube-apiserver, kube-scheduler and kubectl, 1.34 or newer. Otherwise it says why it is skipped.
kube: export OMP_NUM_THREADS := 1
kube: export KUBE_BIN := $(KUBE_BIN)
kube: $(STAMP)
	$(BIN)/pytest benchmarks/clusters/test_kube_live.py -vv -rs

# The plain manifests, which are the chart with its default values.
manifests: $(STAMP)
	PATH=$(BIN):$$PATH helm template vramcast deploy/helm --namespace vramcast > deploy/kubernetes/vramcast.yaml

# Classifies hundreds of known networks in half an hour; an interrupted run resumes from runs/breadth.
breadth: $(STAMP)
	$(BIN)/python -W ignore -m benchmarks.breadth

# Tables and pictures of benchmarks/study/README.md, from the public tables in DATA. Takes hours; resumes from runs/study.
DATA ?= $(or $(VRAMCAST_DATA),data)
STUDY = $(BIN)/python -W ignore -m benchmarks.study.$(1) --data $(DATA) --page benchmarks/study/README.md --picture benchmarks/study/$(1).png

study: $(STAMP)
	$(call STUDY,staircase)
	$(call STUDY,projections)
	$(call STUDY,regression)
	$(BIN)/python -W ignore -m benchmarks.study.vgg_depth --page benchmarks/study/README.md --picture benchmarks/study/vgg_depth.png
	$(call STUDY,ablation)
	$(call STUDY,sampling_curves)

# Fixes what can be fixed automatically and prints the rest.
lint: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) runs build dist *.egg-info
