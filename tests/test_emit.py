"""Rows as scripts: a script contains the measured network, and trains it."""

import subprocess
import sys

import pytest
import torch

from vramcast.jobs.analysis.layers import layer_table
from vramcast.jobs.emit import emit
from vramcast.jobs.families import make_spec, plan_of
from vramcast.jobs.spec import Spec
from vramcast.jobs.subject import build_subject, make_inputs
from vramcast.virtual_gpu.training.setup import TrainingSetup

MLP = {"arch": "gradual", "input_features": 9, "output_features": 3, "depth": 2, "norm": "batch", "dropout": 0.2}
CNN = {"input_channels": 2, "input_size": 12, "num_classes": 3, "depth": 8, "base_filters": 4, "max_filters": 16}
TRANSFORMER = {
    "vocabulary": 20, "embedding_size": 8, "layers": 2, "heads": 2, "feed_forward_size": 12, "sequence_length": 5,
}  # fmt: skip
STAGES = {"stages": [[4, 1], [6, 2]], "input_size": 32, "num_classes": 3, "classifier_features": 8}

SPECS = {
    "mlp": make_spec("mlp", MLP, TrainingSetup(batch_size=4, last_batch_size=3, dry_run_batch_size=2)),
    "mlp-bce": make_spec(
        "mlp", {**MLP, "output_features": 1, "head": "sigmoid"}, TrainingSetup(batch_size=4, loss="bce")
    ),
    "residual": make_spec(
        "cnn",
        {**CNN, "arch": "residual", "norm": "group", "activation": "prelu"},
        TrainingSetup(batch_size=2, optimizer="SGD(momentum=0.9, nesterov=True)", accumulate=2),
    ),
    "dense": make_spec(
        "cnn", {**CNN, "arch": "dense"}, TrainingSetup(batch_size=2, optimizer="Adafactor", dtype="bf16")
    ),
    "checkpointed": make_spec(
        "cnn",
        {**CNN, "arch": "pyramid", "pooling": "max", "pool_every": 4},
        TrainingSetup(batch_size=2, checkpointing=True),
    ),
    "encoder": make_spec(
        "transformer",
        {**TRANSFORMER, "kind": "encoder", "activation": "mish"},
        TrainingSetup(batch_size=2, autocast="bf16", optimizer="AdamW", implementation="foreach"),
    ),
    "decoder": make_spec(
        "transformer",
        {**TRANSFORMER, "kind": "decoder", "norm": "pre"},
        TrainingSetup(batch_size=2, checkpointing=True, optimizer="RMSprop", implementation="single"),
    ),
    "encoder-decoder": make_spec(
        "transformer", {**TRANSFORMER, "kind": "encoder_decoder"}, TrainingSetup(batch_size=2, checkpointing=True)
    ),
    **{
        name: make_spec(
            "template", {**STAGES, "template": name, "norm": "batch"}, TrainingSetup(batch_size=2, loss="mse")
        )
        for name in ("vgg", "resnet", "mobilenet")
    },
}


def _printed(spec: Spec) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "printed"}
    exec(compile(emit(spec), "printed.py", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", SPECS)
def test_the_script_contains_the_subject(name):
    spec = SPECS[name]
    plan = plan_of(spec)
    with torch.device("meta"):
        printed = _printed(spec)["build"]().to(next(build_subject(plan, spec.training.dtype).parameters()).dtype)
    inputs = make_inputs(plan, 2, spec.training.dtype)
    subject = build_subject(plan, spec.training.dtype)
    assert layer_table(printed, inputs) == layer_table(subject, inputs)


RUN_ALL = """
import runpy, sys
scripts, sys.argv = sys.argv[1:], ["row.py", "--device", "cpu", "--epochs", "1"]
for script in scripts:
    runpy.run_path(script, run_name="__main__")
    print("end of", script)
"""


def test_scripts_train_with_torch_only(tmp_path):
    """Run with `-I`, which hides the working directory and user packages: a script must not import this project."""
    scripts = {name: tmp_path / f"{name}.py" for name in SPECS}
    for name, path in scripts.items():
        path.write_text(emit(SPECS[name]))
        assert "dataset_builder" not in path.read_text()
    # in one process, because importing torch takes longer than all of them
    command = [sys.executable, "-I", "-c", RUN_ALL, *scripts.values()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    printed = iter(result.stdout.splitlines())
    for name, path in scripts.items():
        setup = SPECS[name].training
        batches = [line.split(":")[0] for line in iter(printed.__next__, f"end of {path}")]
        last = [f"batch {setup.last_batch_size}"] if setup.last_batch_size else []
        assert batches == [f"batch {setup.batch_size}"] * 3 + last


def test_a_spec_cannot_inject_code_into_the_script():
    call = f"Adam(lr={chr(39)}{chr(34) * 3}; raise SystemExit(7) #{chr(92)}{chr(92)}{chr(39)})"
    spec = make_spec("mlp", MLP, TrainingSetup(batch_size=4, optimizer=call))
    assert '"""' in spec.training.optimizer
    namespace = _printed(spec)
    assert repr(spec.to_json()["training"]["optimizer"]) in namespace["__doc__"]


def test_the_script_names_its_spec():
    text = emit(SPECS["mlp"])
    assert SPECS["mlp"].id in text
    assert "'arch': 'gradual'" in text
