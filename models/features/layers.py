"""Quantities of a layer table that several feature sets use."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vramcast.jobs.spec import LayerRecord
from vramcast.models.example import Example, is_convolution

ACTIVATIONS = (
    "ELU", "GELU", "Identity", "LeakyReLU", "Mish", "PReLU", "ReLU", "SELU", "SiLU", "Softplus", "Tanh",
)  # fmt: skip
"""In alphabetical order, as GPUMemNet places them on half a circle."""
_BY_FUNCTION = {kind.lower(): kind for kind in ACTIVATIONS} | {"leaky_relu": "LeakyReLU"}


def log_amount(amount: float) -> float:
    """Return log(1 + amount), because counts and bytes span nine orders of magnitude."""
    return math.log1p(amount)


def main_activation(layers: Sequence[LayerRecord]) -> str:
    """Return the most frequent activation function, or Identity."""
    counts = Counter(name for layer in layers if (name := activation_of(layer.kind))).most_common(1)
    return counts[0][0] if counts else "Identity"


def activation_of(kind: str) -> str | None:
    """Return the activation function of a layer or function kind, or None."""
    return _BY_FUNCTION.get(kind.lower())


@dataclass(frozen=True)
class Convolution:
    """The elements that one convolution reads and writes for a batch."""

    total: int
    weight: int
    channels: int
    size: int


NO_CONVOLUTION = Convolution(0, 0, 0, 0)


def convolutions_of(example: Example) -> list[Convolution]:
    """Return input, output and weight of each layer; NO_CONVOLUTION for other layers.

    The input is assumed to be the previous output, which is wrong after a branch: a table has no edges.
    """
    convolutions, before = [], example.input_elements
    for layer in example.layers:
        elements = math.prod(layer.output_shape)
        convolutions.append(_convolution(layer, before, elements, example.training.batch_size))
        before = elements
    return convolutions


def _convolution(layer: LayerRecord, before: int, elements: int, batch: int) -> Convolution:
    if not is_convolution(layer.kind) or not layer.output_shape:
        return NO_CONVOLUTION
    total = batch * (before + elements) + layer.parameters
    return Convolution(total, layer.parameters, layer.output_shape[0], layer.output_shape[-1])
