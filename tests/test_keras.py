"""Keras 3 on the torch backend: specs as Keras programs, run on a virtual GPU, and Keras networks as targets."""

import json
import os
import subprocess
from math import prod

import pytest
from script_runs import interpreter_for

from vramcast.cli import main
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.emit_keras import emit_keras
from vramcast.jobs.families import make_spec
from vramcast.jobs.families.template import mutate
from vramcast.jobs.filters import check
from vramcast.jobs.job import SpecJob
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = load_profile("a100_40gb")
BATCH = 32


def template(name, training=None, **network):
    chosen = {"template": name, "stages": mutate(name, 3, 0, "rotated", 0.5), "input_size": 64, "num_classes": 10}
    if name == "vgg":
        chosen["classifier_features"] = 512
    return make_spec("template", {**chosen, **network}, training or TrainingSetup(batch_size=BATCH))


SPECS = {
    "vgg": template("vgg", dropout=0.5, activation="prelu"),
    "resnet": template("resnet", norm="batch"),
    "mobilenet": template("mobilenet", norm="group", kernel_size=5, padding=1, activation="swish"),
    "instance": template("vgg", norm="instance", head="softmax", pool_size=3),
}


def test_a_template_is_printed_as_a_keras_program(tmp_path, capsys):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPECS["mobilenet"].to_json()))
    assert main(["build", "emit", str(path), "--framework", "keras", "-o", str(tmp_path / "row.py")]) == 0
    text = (tmp_path / "row.py").read_text()
    compile(text, "row.py", "exec")
    assert SPECS["mobilenet"].id in text and "layers.DepthwiseConv2D(5, strides=1, padding='valid'" in text
    assert "layers.ZeroPadding2D(1)" in text, "a kernel of 5 with a padding of 1 is neither 'same' nor 'valid'"
    assert main(["build", "emit", str(path), "--framework", "kera"]) == 2
    assert "keras" in capsys.readouterr().err


def test_the_training_is_printed(tmp_path):
    setup = TrainingSetup(
        batch_size=8, last_batch_size=3, optimizer="AdamW(lr=0.1, betas=(0.8, 0.9))", autocast="bf16", accumulate=2,
        dry_run_batch_size=2, cudnn_benchmark=True, loss="mse",
    )  # fmt: skip
    text = emit_keras(template("vgg", setup))
    compile(text, "row.py", "exec")
    words = "beta_1=0.8, beta_2=0.9, learning_rate=0.1, gradient_accumulation_steps=2"
    assert f"keras.optimizers.AdamW({words})" in text and "MeanSquaredError" in text
    assert 'set_dtype_policy("mixed_bfloat16")' in text and "samples = 51" in text
    assert "model(np.zeros((2, 3, 64, 64)" in text and "cudnn.benchmark = True" in text


@pytest.mark.parametrize(
    ("training", "found"),
    [({"checkpointing": True}, "checkpointing"), ({"optimizer": "Rprop"}, "Rprop"),
     ({"channels_last": True}, "channels_last"),
     ({"optimizer": "Adam(maximize=True)"}, "maximize")],
)  # fmt: skip
def test_training_that_keras_lacks_is_refused(training, found):
    with pytest.raises(UserError, match=found):
        emit_keras(template("vgg", TrainingSetup(batch_size=8, **training)))


def test_networks_that_keras_lacks_are_refused():
    network = {"vocabulary": 20, "embedding_size": 8, "layers": 1, "heads": 2, "feed_forward_size": 8,
               "sequence_length": 5, "kind": "encoder"}  # fmt: skip
    with pytest.raises(UserError, match="tokens"):
        emit_keras(make_spec("transformer", network, TrainingSetup(batch_size=2)))


COUNT = """
import os, runpy, sys
os.environ["KERAS_TORCH_DEVICE"] = "meta"
for path in sys.argv[1:]:
    model = runpy.run_path(path)["make_model"]()
    print(sum(item.shape.numel() for item in model.parameters() if item.requires_grad), *model.output_shape[1:])
"""


def test_the_programs_have_the_parameters_of_the_specs(tmp_path):
    interpreter = interpreter_for("keras")
    for name, spec in SPECS.items():
        (tmp_path / f"{name}.py").write_text(emit_keras(spec))
    command = [interpreter, "-c", COUNT, *(str(tmp_path / f"{name}.py") for name in SPECS)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    trainable = [sum(map(prod, check(spec).trainable_shapes)) for spec in SPECS.values()]
    assert printed == [f"{count} 10" for count in trainable]


def test_a_printed_program_takes_the_memory_of_its_layers(tmp_path):
    """Keras keeps the outputs of all layers until the end of the forward pass, where torch frees some."""
    interpreter = interpreter_for("keras")
    spec = template("vgg")
    (tmp_path / "row.py").write_text(emit_keras(spec))
    report = run_script(parse_command([interpreter, str(tmp_path / "row.py")]), A100, [], RunOptions(steps=4))
    assert report.failure is None and report.steps[0].shapes == ((BATCH, 3, 64, 64),)
    keras = report.simulation
    own = Simulator(SpecJob(spec)).simulate({}, [A100])
    assert keras.table.parameters == own.table.parameters
    held, expected = (item.peaks["a100_40gb"].bounded.breakdown for item in (keras, own))
    weights = 4 * own.table.parameters
    assert held["parameters"] == expected["parameters"] == pytest.approx(weights, rel=0.001)
    assert held["gradients"] == weights
    assert held["optimizer_state"] == pytest.approx(expected["optimizer_state"], abs=64)
    pooled = sum(prod(item.output_shape) for item in own.table.layers if item.kind == "MaxPool2d")
    outputs = BATCH * (4 * own.table.activations + 8 * pooled)  # with the indices of the maxima
    assert held["activations"] == pytest.approx(outputs, rel=0.03)
    assert {item.kind for item in keras.costs} >= {"Conv2D", "Activation"}, "layers have names"


SUBCLASS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
class Net(keras.Model):
    def __init__(self, width):
        super().__init__()
        self.hidden, self.drop = keras.layers.Dense(width, activation="relu"), keras.layers.Dropout(0.5)
        self.heads = [keras.layers.Dense(10)]
    def call(self, x, training=False):
        return self.heads[0](self.drop(self.hidden(x), training=training))
"""


def test_classify_takes_keras_networks(tmp_path, capsys):
    interpreter = interpreter_for("keras")
    (tmp_path / "net.py").write_text(SUBCLASS)
    words = ["--arg", "width=4096", "--input", "784", "--batch-size", "512", "--device", "a100_40gb", "--json"]
    words += ["--optimizer", "Adam", "--python", interpreter]
    assert main(["classify", f"{tmp_path / 'net.py'}:Net", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    weights = 4 * (784 * 4096 + 4096 + 4096 * 10 + 10) / 2**20
    assert answer["breakdown_mib"]["parameters"] == pytest.approx(weights, rel=0.01)
    assert answer["breakdown_mib"]["optimizer_state"] == pytest.approx(2 * weights, rel=0.01)
    hidden = 4 * 512 * 4096 / 2**20
    assert answer["allocated_mib"] > 4 * weights + 2 * hidden, "its activation, and the gradient of that or its mask"
    assert os.environ.get("KERAS_BACKEND") is None, "the user's code ran in another process"
