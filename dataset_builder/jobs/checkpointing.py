"""Activation checkpointing for any network: by its own switch, else around its repeated blocks."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from vramcast.errors import UserError


def enable_checkpointing(module: nn.Module) -> None:
    """Make a network recompute its blocks in the backward pass."""
    for part in module.modules():
        switch: Any = getattr(part, "gradient_checkpointing_enable", None)  # transformers
        if callable(switch):
            switch(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
        switch = getattr(part, "set_grad_checkpointing", None)  # timm
        if callable(switch):
            switch(True)
            return
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise UserError(
            f"expected repeated blocks in a ModuleList or Sequential of {type(module).__name__}, found none: "
            "leave out checkpointing, which has nothing to recompute"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists that hold two or more composite modules of one class."""
    blocks = [item for item in module.children() if next(item.children(), None) is not None]
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(blocks) > len({type(item) for item in blocks}):
        yield from blocks
        return
    for child in module.children():
        yield from repeated_blocks(child)
