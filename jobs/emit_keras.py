"""Prints a spec as a Keras 3 program on the torch backend, with the layers and shapes of the spec's network."""

from collections.abc import Callable, Mapping, Sequence
from pprint import pformat
from string import Template
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.emit import escaped
from vramcast.jobs.families import plan_of
from vramcast.jobs.plan import InputTensor, Node
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call

_IMAGE_RANK = 4
_ACTIVATIONS = {
    "ReLU": 'Activation("relu")',
    "LeakyReLU": "LeakyReLU(0.01)",
    "ELU": 'Activation("elu")',
    "SELU": 'Activation("selu")',
    "Tanh": 'Activation("tanh")',
    "Softplus": 'Activation("softplus")',
    "SiLU": 'Activation("silu")',
    "Mish": 'Activation("mish")',
    "GELU": 'Activation("gelu")',
    "Softmax": 'Activation("softmax")',
    "Sigmoid": 'Activation("sigmoid")',
}
_LOSSES = {
    "cross_entropy": "keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
    "bce_with_logits": "keras.losses.BinaryCrossentropy(from_logits=True)",
    "bce": "keras.losses.BinaryCrossentropy()",
    "mse": "keras.losses.MeanSquaredError()",
}
_OPTIMIZERS = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Adamax")
_ARGUMENTS = {"lr": "learning_rate", "eps": "epsilon", **{name: name for name in ("momentum", "nesterov", "centered")}}
_ARGUMENTS |= {name: name for name in ("weight_decay", "amsgrad", "rho")}
_POLICIES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PROGRAM = Template('''\
"""A $family network with its training, in Keras 3 on the torch backend.

Spec $id, printed by vramcast:
$spec
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

keras.config.set_image_data_format("channels_first")
keras.config.set_dtype_policy("$policy")


def make_model() -> keras.Model:
    inputs = x = keras.Input($shape)
$layers
    return keras.Model(inputs, x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on random data.")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of three full batches and the smaller last batch")
    options = parser.parse_args()
$settings
    model = make_model()
$dry_run    model.compile(optimizer=$optimizer, loss=$loss)
    samples = $samples
    x = np.random.rand(samples, *$shape).astype("float32")
    y = $targets
    model.fit(x, y, batch_size=$batch_size, epochs=options.epochs, shuffle=False, verbose=2)


if __name__ == "__main__":
    main()
''')


def emit_keras(spec: Spec) -> str:
    """Return the Keras program of a spec; raise a UserError where Keras has no counterpart."""
    plan, setup = plan_of(spec), spec.training
    shape = _image_or_vector(plan.inputs)
    _check_training(setup)
    lines: list[str] = []
    _Printer(lines).print(plan.root, "x", len(shape) + 1)
    policy = f"mixed_{_POLICIES[setup.autocast]}" if setup.autocast else _POLICIES[setup.dtype]
    benchmark = "    import torch\n\n    torch.backends.cudnn.benchmark = True\n"
    return _PROGRAM.substitute(
        family=spec.family,
        id=spec.id,
        spec=escaped(pformat(spec.to_json(), width=110)),
        policy=policy,
        shape=shape,
        layers="\n".join(f"    {line}" for line in lines),
        settings=benchmark if setup.cudnn_benchmark else "",
        dry_run=_dry_run(setup, shape),
        optimizer=_optimizer(setup),
        loss=_LOSSES[setup.loss],
        samples=3 * setup.accumulate * setup.batch_size + (setup.last_batch_size or 0),
        targets=_targets(setup.loss),
        batch_size=setup.batch_size,
    )


def _image_or_vector(inputs: Sequence[InputTensor]) -> tuple[int, ...]:
    if len(inputs) != 1 or inputs[0].vocabulary is not None:
        raise UserError(
            "expected a network of images or vectors for Keras, found one of tokens: print it without --framework keras"
        )
    return tuple(inputs[0].shape)


def _check_training(setup: TrainingSetup) -> None:
    unknown = [
        name for name in ("checkpointing", "prefetched_batches", "parallel", "channels_last") if getattr(setup, name)
    ]
    if unknown:
        raise UserError(
            f"expected a training that Keras' fit can run, found {unknown[0]}={getattr(setup, unknown[0])!r}: "
            "print it without --framework keras"
        )
    if setup.loss not in _LOSSES:
        raise UserError(f"expected a loss of {', '.join(_LOSSES)}, found {setup.loss!r}: choose one of these")


def _optimizer(setup: TrainingSetup) -> str:
    name, arguments = parse_call(setup.optimizer)
    if name not in _OPTIMIZERS:
        raise UserError(f"expected an optimizer that Keras has ({', '.join(_OPTIMIZERS)}), found {name}: change it")
    words: dict[str, Any] = {}
    for key, value in arguments.items():
        if key == "betas":
            words |= {"beta_1": value[0], "beta_2": value[1]}
        elif key in _ARGUMENTS:
            words[_ARGUMENTS[key]] = value
        else:
            raise UserError(f"expected arguments of {name} that Keras has, found {key}: remove it")
    if setup.accumulate > 1:
        words["gradient_accumulation_steps"] = setup.accumulate
    return f"keras.optimizers.{name}({_call(words)})"


def _dry_run(setup: TrainingSetup, shape: tuple[int, ...]) -> str:
    if not setup.dry_run_batch_size:
        return ""
    return (
        f"    for _ in range({setup.dry_run_passes}):  # forward passes before training, as a summary makes them\n"
        f"        model(np.zeros({(setup.dry_run_batch_size, *shape)}, dtype='float32'), training=True)\n"
    )


def _targets(loss: str) -> str:
    if loss == "cross_entropy":
        return "np.random.randint(0, model.output_shape[-1], samples)"
    return 'np.random.rand(samples, *model.output_shape[1:]).astype("float32")'


def _call(words: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in words.items())


class _Printer:
    """Prints the nodes of a plan as calls of the functional interface, one line each."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._branches = 0
        self._kinds: dict[str, Callable[[Mapping[str, Any], str, int], int]] = {
            "Conv2d": self._convolution,
            "MaxPool2d": self._max_pool,
            "AdaptiveAvgPool2d": self._adaptive_pool,
            "Flatten": lambda args, name, rank: self._layer("Flatten()", name, 2),
            "Linear": self._dense,
            "Dropout": lambda args, name, rank: self._layer(f"Dropout({args['p']})", name, rank),
            "BatchNorm1d": self._batch_norm,
            "BatchNorm2d": self._batch_norm,
            "GroupNorm": self._group_norm,
            "InstanceNorm2d": lambda args, name, rank: self._groups(-1, name, rank),
            "PReLU": self._prelu,
            "Identity": lambda args, name, rank: rank,
        }

    def print(self, node: Node, name: str, rank: int) -> int:
        """Print a node that changes the variable `name`, whose tensor has this rank; return the rank after it."""
        if node.kind == "Sequential":
            for child in node.children:
                rank = self.print(child, name, rank)
            return rank
        if node.kind == "Residual":
            return self._residual(node, name, rank)
        if node.kind in _ACTIVATIONS:
            return self._layer(_ACTIVATIONS[node.kind], name, rank)
        if node.kind not in self._kinds:
            raise UserError(
                f"expected layers that Keras has, found {node.kind}: print the spec without --framework keras"
            )
        return self._kinds[node.kind](node.args, name, rank)

    def _layer(self, call: str, name: str, rank: int) -> int:
        self._lines.append(f"{name} = layers.{call}({name})")
        return rank

    def _residual(self, node: Node, name: str, rank: int) -> int:
        self._branches += 1
        branches = [f"body_{self._branches}", f"shortcut_{self._branches}"]
        if node.args.get("shortcut_first"):
            order = [(node.children[1], branches[1]), (node.children[0], branches[0])]
        else:
            order = list(zip(node.children, branches, strict=True))
        for child, branch in order:
            self._lines.append(f"{branch} = {name}")
            self.print(child, branch, rank)
        self._lines.append(f"{name} = layers.Add()([{', '.join(branches)}])")
        return rank

    def _padding(self, kernel_size: int, padding: int, name: str, rank: int) -> str:
        """Return Keras' word for a padding, after printing the layer that pads where there is no word."""
        if padding and kernel_size == 2 * padding + 1:  # ceil(size / stride) in both
            return "same"
        if padding:
            self._layer(f"ZeroPadding2D({padding})", name, rank)
        return "valid"

    def _convolution(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        padding = self._padding(args["kernel_size"], args.get("padding", 0), name, rank)
        words = {"strides": args.get("stride", 1), "padding": padding, "use_bias": args.get("bias", True)}
        groups = args.get("groups", 1)
        if groups > 1 and groups == args["in_channels"] == args["out_channels"]:
            return self._layer(f"DepthwiseConv2D({args['kernel_size']}, {_call(words)})", name, rank)
        if groups > 1:
            words["groups"] = groups
        return self._layer(f"Conv2D({args['out_channels']}, {args['kernel_size']}, {_call(words)})", name, rank)

    def _max_pool(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        padding = self._padding(args["kernel_size"], args.get("padding", 0), name, rank)
        words = {"strides": args.get("stride", args["kernel_size"]), "padding": padding}
        return self._layer(f"MaxPooling2D({args['kernel_size']}, {_call(words)})", name, rank)

    def _adaptive_pool(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        if args["output_size"] == 1:
            return self._layer("GlobalAveragePooling2D(keepdims=True)", name, rank)
        return self._layer(f"AdaptiveAveragePooling2D({args['output_size']})", name, rank)

    def _dense(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        return self._layer(f"Dense({args['out_features']}, use_bias={args.get('bias', True)})", name, rank)

    def _batch_norm(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        return self._layer("BatchNormalization(axis=1, momentum=0.9, epsilon=1e-5)", name, rank)

    def _group_norm(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        return self._groups(args["num_groups"], name, rank)

    def _groups(self, groups: int, name: str, rank: int) -> int:
        return self._layer(f"GroupNormalization({groups}, axis=1, epsilon=1e-5)", name, rank)

    def _prelu(self, args: Mapping[str, Any], name: str, rank: int) -> int:
        axes = [1, 2, 3] if rank == _IMAGE_RANK else [1]
        return self._layer(f"PReLU(shared_axes={axes})", name, rank)  # one slope, as in nn.PReLU
