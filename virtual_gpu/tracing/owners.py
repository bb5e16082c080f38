"""Identifies the layers of a network, so that a trace can name the owner of each block."""

from collections.abc import Iterator
from typing import Any

from torch import nn

# Modules that users regard as one layer although they have children.
_UNITS = (nn.MultiheadAttention, nn.RNNBase)
_CONTAINERS = (nn.ParameterDict, nn.ParameterList)
"""Children that hold parameters and never run."""


def is_layer(module: nn.Module) -> bool:
    """Return whether a module counts as one layer: it has no children that run, or is one of `_UNITS`."""
    return isinstance(module, _UNITS) or not any(_runs(item) for item in _parts(module))


def is_keras(module: nn.Module) -> bool:
    """Return whether a module is a layer of Keras 3, by a method that all of them have: Keras may not be installed."""
    return hasattr(module, "_flatten_layers")


def named_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all modules inside it with their names, also the layers of Keras."""
    for name, part in module.named_modules(prefix=prefix):
        yield name, part
        for inner in _keras_layers(part):
            yield from named_parts(inner, f"{name}.{inner.name}" if name else str(inner.name))


def _runs(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield from module.children()
    yield from _keras_layers(module)


def _keras_layers(module: nn.Module) -> list[Any]:
    """Return the layers inside a layer of Keras, which does not register them with torch."""
    return [item for item in getattr(module, "_layers", ()) if isinstance(item, nn.Module)] if is_keras(module) else []


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists that hold two or more composite modules of one class."""
    blocks = [item for item in module.children() if next(item.children(), None) is not None]
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(blocks) > len({type(item) for item in blocks}):
        yield from blocks
        return
    for child in module.children():
        yield from repeated_blocks(child)
