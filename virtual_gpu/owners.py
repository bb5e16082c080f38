"""Identifies the layers of a network, so that a trace can name the owner of each block."""

from collections.abc import Iterator

from torch import nn

# Modules that users regard as one layer although they have children.
_UNITS = (nn.MultiheadAttention, nn.RNNBase)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module counts as one layer: it has no children, or is one of `_UNITS`."""
    return isinstance(module, _UNITS) or next(module.children(), None) is None


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists that hold two or more composite modules of one class."""
    blocks = [item for item in module.children() if next(item.children(), None) is not None]
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(blocks) > len({type(item) for item in blocks}):
        yield from blocks
        return
    for child in module.children():
        yield from repeated_blocks(child)
