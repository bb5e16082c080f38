"""Horus' closed formula (Yeung et al., TPDS 2022), as GPUMemNet evaluates it."""

from collections.abc import Iterable
from math import prod

from vramcast.jobs.spec import LayerRecord
from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB

_ELEMENT_BYTES = 4
_CONSTANT_BYTES = 800 * MIB
"""Not in the published code, but in every published figure: the value at batch size 0."""
_UNCOUNTED = ("MaxPool", "AvgPool", "Flatten", "Identity", "StochasticDepth", "DropPath")
"""Layers that GPUMemNet's summary parser, the source of the activations, skips."""


class Horus(Formula):
    """4 (A B + P + B P) bytes and 800 MiB: activations A of a sample, batch B, and P gradients for every sample.

    The published reading multiplies gradients by the batch, so wide networks come out many times too large. Elements
    have four bytes in every precision, and the optimizer does not matter.
    """

    name = "horus"

    def used_bytes(self, example: Example) -> float:
        """Return the formula's figure."""
        parameters = sum(layer.parameters for layer in example.layers)
        return horus_bytes(parsed_activations(example.layers), parameters, example.training.batch_size)


def horus_bytes(activations: int, parameters: int, batch_size: int) -> int:
    """Evaluate the formula for the activations of one sample."""
    elements = activations * batch_size + parameters + batch_size * parameters
    return _ELEMENT_BYTES * elements + _CONSTANT_BYTES


def parsed_activations(layers: Iterable[LayerRecord]) -> int:
    """Return the outputs of one sample in a layer summary: with in-place layers, without functions."""
    return sum(prod(layer.output_shape) for layer in layers if _is_counted(layer))


def _is_counted(layer: LayerRecord) -> bool:
    return bool(layer.output_shape) and not layer.functional and not layer.kind.startswith(_UNCOUNTED)
