"""Batches of any structure, as shapes: what is drawn on the host once is made again without memory, at any size."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from vramcast.errors import UserError
from vramcast.virtual_gpu.training_step import DTYPES

MakeBatch = Callable[[int], Any]
"""A tensor, a tuple of what a network takes, or a mapping of its keyword arguments, for a batch size."""


def batches(make: MakeBatch) -> Callable[[int, str], Any]:
    """Batches like those of `make` on the meta device, floating point in a dtype of the training."""

    @cache
    def shapes(size: int) -> Any:
        return tree_map_only(Tensor, _placed, _drawn(make, size))

    def fresh(size: int, dtype: str) -> Any:
        return tree_map_only(Tensor, lambda item: _like(item, DTYPES[dtype]), shapes(size))

    return fresh


def _drawn(make: MakeBatch, size: int) -> Any:
    """On meta, where that works; a function that looks at numbers gets them."""
    try:
        with torch.device("meta"):
            found = make(size)
    except (NotImplementedError, RuntimeError):
        found = make(size)
    leaves = tree_leaves(found)
    if not any(isinstance(item, Tensor) or hasattr(item, "to") for item in leaves):
        raise UserError(f"expected tensors as inputs, found {found!r}: return them from the inputs function")
    return _moved(found)


def _moved(batch: Any) -> Any:
    """Objects that hold tensors, such as a graph of torch_geometric, move themselves."""
    return batch.to("meta") if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)) else batch


def _placed(item: Tensor) -> Tensor:
    return torch.empty(item.shape, dtype=item.dtype, device="meta")


def _like(item: Tensor, dtype: torch.dtype) -> Tensor:
    wanted = dtype if item.dtype in DTYPES.values() else item.dtype
    return torch.empty(item.shape, dtype=wanted, device="meta")


def resized(sample: Any) -> tuple[MakeBatch, int]:
    """From one batch, given as an example, to batches of any size; and the size of the one that was given.

    The first dimension is the batch's, in all tensors that share the first tensor's.
    """
    tensors = [item for item in tree_leaves(sample) if isinstance(item, Tensor)]
    if not tensors or not tensors[0].dim():
        raise UserError(f"expected inputs with a batch dimension, found {sample!r}: give tensors, batch first")
    given = tensors[0].shape[0]

    def make(size: int) -> Any:
        return tree_map_only(Tensor, lambda item: _with_batch(item, given, size), sample)

    return make, given


def _with_batch(item: Tensor, given: int, size: int) -> Tensor:
    batched = item.dim() > 0 and item.shape[0] == given
    shape = (size, *item.shape[1:]) if batched else tuple(item.shape)
    return torch.empty(shape, dtype=item.dtype, device="meta")


def call(network: Callable[..., Any], batch: Any) -> Any:
    """Run a network on a batch: a mapping names its arguments, a tuple lists them."""
    if isinstance(batch, Mapping):
        return network(**batch)
    return network(*batch) if isinstance(batch, tuple | list) else network(batch)
