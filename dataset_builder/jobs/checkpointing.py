"""Activation checkpointing for any network: by its own switch, else around its repeated blocks."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from vramcast.errors import UserError
from vramcast.virtual_gpu.owners import repeated_blocks


def enable_checkpointing(module: nn.Module) -> None:
    """Make a network recompute its blocks in the backward pass."""
    for part in module.modules():
        switch: Any = getattr(part, "gradient_checkpointing_enable", None)  # transformers
        if callable(switch):
            switch(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
        switch = getattr(part, "enable_gradient_checkpointing", None)  # diffusers
        if callable(switch):
            switch()
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
