"""Identifies the layers of a network, so that a trace can name the owner of each block."""

from torch import nn

# Modules that users regard as one layer although they have children.
_UNITS = (nn.MultiheadAttention, nn.RNNBase)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module counts as one layer: it has no children, or is one of `_UNITS`."""
    return isinstance(module, _UNITS) or next(module.children(), None) is None
