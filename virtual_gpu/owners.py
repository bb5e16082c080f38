"""Tell which layer of a network is running, so that a trace can name the owner of each block."""

from torch import nn

# Modules that are one layer to a reader although they are made of others.
_UNITS = (nn.MultiheadAttention, nn.RNNBase)


def is_layer(module: nn.Module) -> bool:
    """A module without children, or a known unit."""
    return isinstance(module, _UNITS) or next(module.children(), None) is None
