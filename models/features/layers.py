"""What several feature sets read off a layer table."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vramcast.dataset_builder.schema import LayerRecord
from vramcast.models.example import Example, is_convolution

ACTIVATIONS = (
    "ELU", "GELU", "Identity", "LeakyReLU", "Mish", "PReLU", "ReLU", "SELU", "SiLU", "Softplus", "Tanh",
)  # fmt: skip
"""In alphabetical order: GPUMemNet places them on half a circle."""
_BY_FUNCTION = {kind.lower(): kind for kind in ACTIVATIONS} | {"leaky_relu": "LeakyReLU"}


def log_amount(amount: float) -> float:
    """Counts and bytes span nine orders of magnitude: they are told apart by ratio. Zero stays zero."""
    return math.log1p(amount)


def main_activation(layers: Sequence[LayerRecord]) -> str:
    """The most frequent activation function, Identity where there is none."""
    found = Counter(name for layer in layers if (name := activation_of(layer.kind))).most_common(1)
    return found[0][0] if found else "Identity"


def activation_of(kind: str) -> str | None:
    """The activation function that a layer or function is, None for any other."""
    return _BY_FUNCTION.get(kind.lower())


@dataclass(frozen=True)
class Convolution:
    """Elements that one convolution reads and writes with the whole batch."""

    total: int
    weight: int
    channels: int
    size: int


NO_CONVOLUTION = Convolution(0, 0, 0, 0)


def convolutions_of(example: Example) -> list[Convolution]:
    """Of each layer: input, output and weight together; NO_CONVOLUTION for any other layer.

    The input is taken to be the output before, which a branch makes wrong: a table does not say who reads whom.
    """
    found, before = [], example.input_elements
    for layer in example.layers:
        elements = math.prod(layer.output_shape)
        found.append(_convolution(layer, before, elements, example.training.batch_size))
        before = elements
    return found


def _convolution(layer: LayerRecord, before: int, elements: int, batch: int) -> Convolution:
    if not is_convolution(layer.kind) or not layer.output_shape:
        return NO_CONVOLUTION
    total = batch * (before + elements) + layer.parameters
    return Convolution(total, layer.parameters, layer.output_shape[0], layer.output_shape[-1])
