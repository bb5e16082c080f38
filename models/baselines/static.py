"""SGV, the static estimate of TBEM: what shapes alone predict."""

from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example


class Static(Formula):
    """The static estimate without context, cache or workspaces."""

    name = "static"

    def used_bytes(self, example: Example) -> float:
        """Return the sum of parameters, gradients, optimizer state and activations."""
        return example.static.total_bytes
