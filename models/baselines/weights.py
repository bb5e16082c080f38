"""The rule of thumb that `accelerate estimate-memory` prints for training: four times the weights."""

from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example

_COPIES = 4
"""Weights, gradients and Adam's two states (accelerate, commands/estimate.py); no activations, no context."""


class Weights(Formula):
    """Weights, gradients and Adam's states, whatever the optimizer is and whatever the batch."""

    name = "weights"

    def used_bytes(self, example: Example) -> float:
        """Four times the bytes of the parameters."""
        return _COPIES * example.static.parameter_bytes
