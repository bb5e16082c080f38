"""Which modules of a network are sharded one by one: named classes, those of the library, or the repeated blocks."""

from collections.abc import Sequence

from torch import nn

from vramcast.errors import UserError
from vramcast.virtual_gpu.tracing.owners import repeated_blocks


def wrapped_modules(network: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules to wrap, inner ones first; the root is not among them.

    Without names they are the classes that the network says not to split (transformers' _no_split_modules, the default
    of accelerate), else the blocks that repeat (torchtitan).
    """
    if names:
        return _of_classes(network, names)
    by_library = [name for module in network.modules() for name in getattr(module, "_no_split_modules", None) or ()]
    modules = [module for module in network.modules() if type(module).__name__ in by_library]
    return _inner_first(modules or list(repeated_blocks(network)), network)


def _of_classes(network: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    classes = {type(module).__name__ for module in network.modules()}
    missing = [name for name in names if name not in classes]
    if missing:
        blocks = sorted({type(module).__name__ for module in network.modules() if list(module.children())})
        raise UserError(
            f"expected wrap to name a class of the network, found {', '.join(missing)}: use one of {', '.join(blocks)}"
        )
    return _inner_first([module for module in network.modules() if type(module).__name__ in names], network)


def _inner_first(modules: Sequence[nn.Module], network: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(modules) if module is not network and any(True for _ in module.parameters())]
