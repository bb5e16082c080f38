"""Follows the data of a network from layer to layer: whose output a layer reads, and what its backward pass keeps."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from vramcast.jobs.spec import NETWORK_INPUT

Sources = frozenset[int] | None
"""Places of layers in the table; None if one of them is not known."""


class DataFlow:
    """The layers that made each storage, and the storages that backward passes keep.

    A storage is known by its address, so each one that was seen stays alive: an address is never used twice.
    """

    def __init__(self, inputs: Iterable[Tensor], owned: Iterable[Tensor], batch_size: int) -> None:
        self.batch_size = batch_size
        self._makers: dict[int, Sources] = {}
        self._alive: dict[int, UntypedStorage] = {}
        self._ignored = {self._address(item) for item in owned}
        """Parameters and buffers, which have no maker and are kept anyway."""
        for item in inputs:
            self._makers[self._address(item)] = frozenset({NETWORK_INPUT})
        self._kept = {*self._ignored, *self._makers}
        self._floats = self._other_bytes = 0

    def _address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address: int = storage._cdata
        self._alive[address] = storage
        return address

    def sources(self, addresses: Iterable[int]) -> Sources:
        """Return the layers that made the storages at some addresses."""
        makers = [self._makers.get(item) for item in addresses if item not in self._ignored]
        certain = [item for item in makers if item is not None]
        return frozenset().union(*certain) if len(certain) == len(makers) else None

    def made_by(self, place: int, outputs: Iterable[Tensor]) -> None:
        """Note that the layer at a place made its outputs, or changed them in place."""
        for item in outputs:
            self._makers[self._address(item)] = frozenset({place})

    def passed(self, addresses: Iterable[int], outputs: Iterable[Tensor]) -> None:
        """Note that an operation which is no layer moved or changed data: its sources stay those of its outputs."""
        sources = self.sources(addresses)
        for item in outputs:
            address = self._address(item)
            before = self._makers.get(address, frozenset())
            self._makers[address] = None if sources is None or before is None else before | sources

    def take_saved(self) -> tuple[int, int]:
        """Return the elements and the other bytes of a sample that were saved since the last call."""
        saved = self._floats // self.batch_size, self._other_bytes // self.batch_size
        self._floats = self._other_bytes = 0
        return saved

    @contextmanager
    def watching_saved(self) -> Iterator[None]:
        """See what autograd saves; nothing can be differentiated after, because nothing is really saved."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, _refuse):
            yield

    def _save(self, tensor: Tensor) -> None:
        address = self._address(tensor)
        if address in self._kept:
            return
        self._kept.add(address)
        nbytes = self._alive[address].nbytes()
        if tensor.is_floating_point():
            self._floats += nbytes // tensor.element_size()
        else:
            self._other_bytes += nbytes


def _refuse(_: Any) -> Tensor:
    raise RuntimeError("a network was differentiated whose saved tensors were only counted")
