"""GPUMemNet's features: depth, counts by type, batch, parameters, activations, and the activation function."""

import math

from vramcast.models.example import Example
from vramcast.models.features.layers import ACTIVATIONS, log_amount, main_activation
from vramcast.models.layer_columns import LayerColumns

_COUNTED = ("Linear", "Conv2d", "BatchNorm1d", "BatchNorm2d", "Dropout", "MultiheadAttention", "LayerNorm")
"""An attention stands for its output projection, 'NonDynamicallyQuantizableLinear' in GPUMemNet."""


def published_numbers(example: Example) -> dict[str, float]:
    """Return the features of all three published estimators, with logarithms of GPUMemNet's raw amounts."""
    layers = LayerColumns.of(layer for layer in example.layers if not layer.functional)
    counts, activations = layers.counts, sum(layers.activations)
    batch = example.training.batch_size
    angle = math.pi * ACTIVATIONS.index(main_activation(layers)) / len(ACTIVATIONS)
    return {
        "depth": log_amount(len(layers)),
        "batch": log_amount(batch),
        "parameters": log_amount(sum(layers.parameters)),
        "activations": log_amount(activations),
        "activations_x_batch": log_amount(activations * batch),
        **{f"count_{kind}": log_amount(counts[kind]) for kind in _COUNTED},
        "act_sin": math.sin(angle),
        "act_cos": math.cos(angle),
    }
