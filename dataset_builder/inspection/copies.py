"""A module's structure without its numbers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dataset_builder.errors import UserError


def structure_of(module: nn.Module) -> nn.Module:
    """A copy on the meta device that shares nothing with the module; no number is copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        held = (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        for item in held:
            if isinstance(item, Tensor):
                memo[id(item)] = _on_meta(item)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a foreign class raises
        raise UserError(
            f"expected a module that can be copied, found {type(module).__name__} with {error}: "
            "build it on the meta device, and hand over a function that does so"
        ) from error


def _on_meta(item: Tensor) -> Tensor:
    bare = torch.empty_like(item, device="meta", requires_grad=False)
    return nn.Parameter(bare, item.requires_grad) if isinstance(item, nn.Parameter) else bare
