"""Batches of any structure, kept as shapes: a batch is drawn once and repeated on the meta device at any size."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from vramcast.errors import UserError
from vramcast.jobs.sampled_batches import SampledBatch, largest_batch, seeded
from vramcast.virtual_gpu.training.step import DTYPES

MakeBatch = Callable[[int], Any]
"""Returns a tensor, a tuple of arguments, or a mapping of keyword arguments for a batch size."""


class Batches:
    """Batches of any size and dtype on the meta device, with the shapes that `make` gives them."""

    def __init__(self, make: MakeBatch) -> None:
        self._make = make
        self._sampled: dict[int, SampledBatch] = {}

    def __call__(self, size: int, dtype: str) -> Any:
        """Return a batch; it is drawn once for each size."""
        return tree_map_only(Tensor, lambda item: _like(item, DTYPES[dtype]), self._sample(size).batch)

    def with_values(self, size: int) -> Any:
        """Draw the batch of a size again, as `make` returns it."""
        return seeded(partial(self._make, size), self._sample(size).seed)

    def notes(self, size: int) -> tuple[str, ...]:
        """Return what was assumed about the shapes of a batch."""
        note = self._sample(size).note
        return (note,) if note else ()

    def _sample(self, size: int) -> SampledBatch:
        if size not in self._sampled:
            draw = partial(_draw, partial(self._make, size))
            self._sampled[size] = largest_batch(lambda seed: tree_map_only(Tensor, _on_meta, draw(seed)))
        return self._sampled[size]


def _draw(make: Callable[[], Any], seed: int) -> Any:
    """Draw a batch on meta, or on the CPU where the function reads values."""
    try:
        with torch.device("meta"):
            batch = seeded(make, seed)
    except (NotImplementedError, RuntimeError):
        batch = seeded(make, seed)
    if not any(isinstance(item, Tensor) or hasattr(item, "to") for item in tree_leaves(batch)):
        raise UserError(f"expected tensors as inputs, found {batch!r}: return tensors from the inputs function")
    # Objects that hold tensors, such as a graph of torch_geometric, move themselves.
    return batch.to("meta") if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)) else batch


def _on_meta(item: Tensor) -> Tensor:
    return torch.empty(item.shape, dtype=item.dtype, device="meta")


def _like(item: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(item.shape, dtype=dtype if item.dtype in DTYPES.values() else item.dtype, device="meta")


def resized(sample: Any) -> tuple[MakeBatch, int]:
    """Return a function that makes batches of any size like the sample, and the sample's batch size.

    The first dimension is the batch in all tensors whose first dimension equals that of the first tensor.
    """
    tensors = [item for item in tree_leaves(sample) if isinstance(item, Tensor)]
    if not tensors or not tensors[0].dim():
        raise UserError(f"expected inputs with a batch dimension, found {sample!r}: give tensors, batch first")
    sample_size = tensors[0].shape[0]

    def make(size: int) -> Any:
        return tree_map_only(Tensor, lambda item: _with_batch(item, sample_size, size), sample)

    return make, sample_size


def _with_batch(item: Tensor, sample_size: int, size: int) -> Tensor:
    batched = item.dim() > 0 and item.shape[0] == sample_size
    shape = (size, *item.shape[1:]) if batched else tuple(item.shape)
    return torch.empty(shape, dtype=item.dtype, device="meta")


def with_length(batch: Any, length: int) -> Any:
    """Return a batch of sequences of tokens with another length: the second dimension of whole numbers."""
    return tree_map_only(Tensor, lambda item: _of_length(item, length), batch)


def _of_length(item: Tensor, length: int) -> Tensor:
    if item.dim() < 2 or item.is_floating_point():
        return item
    return torch.empty((item.shape[0], length, *item.shape[2:]), dtype=item.dtype, device=item.device)


def call(network: Callable[..., Any], batch: Any) -> Any:
    """Call a network on a batch: a mapping holds keyword arguments, a tuple or list positional ones."""
    if isinstance(batch, Mapping):
        return network(**batch)
    return network(*batch) if isinstance(batch, tuple | list) else network(batch)


def input_shapes(batch: Any) -> tuple[dict[str, Any], ...]:
    """Return shape (without the batch dimension) and dtype of each tensor in a batch."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [item for item in leaves if isinstance(item, Tensor)]
    return tuple({"shape": list(item.shape[1:]), "dtype": str(item.dtype).removeprefix("torch.")} for item in tensors)
