"""Quantities of a layer table that several feature sets use."""

import math
from collections.abc import Sequence
from functools import lru_cache

from vramcast.jobs.spec import LayerRecord
from vramcast.models.example import Example
from vramcast.models.layer_columns import KINDS_REMEMBERED, LayerColumns

ACTIVATIONS = (
    "ELU", "GELU", "Identity", "LeakyReLU", "Mish", "PReLU", "ReLU", "SELU", "SiLU", "Softplus", "Tanh",
)  # fmt: skip
"""In alphabetical order, as GPUMemNet places them on half a circle."""
_BY_FUNCTION = {kind.lower(): kind for kind in ACTIVATIONS} | {"leaky_relu": "LeakyReLU"}


def log_amount(amount: float) -> float:
    """Return log(1 + amount), because counts and bytes span nine orders of magnitude."""
    return math.log1p(amount)


def main_activation(layers: Sequence[LayerRecord]) -> str:
    """Return the most frequent activation function, the first of several, or Identity."""
    numbers: dict[str, int] = {}
    for kind, number in LayerColumns.of(layers).counts.items():
        if name := activation_of(kind):
            numbers[name] = numbers.get(name, 0) + number
    return max(numbers, key=numbers.__getitem__, default="Identity")


@lru_cache(maxsize=KINDS_REMEMBERED)
def activation_of(kind: str) -> str | None:
    """Return the activation function of a layer or function kind, or None."""
    return _BY_FUNCTION.get(kind.lower())


def largest_convolution(example: Example) -> int:
    """Return the elements that the largest convolution reads and writes for a batch, 0 without any."""
    totals = example.columns.convolutions(example.input_elements).totals(example.training.batch_size)
    return int(totals.max(initial=0))
