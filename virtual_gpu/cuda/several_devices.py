"""Several devices in one process: tensors know theirs, and the memory of one device is traced in each run.

A storage on another device than the observed one exists as on the host: its shape is known, and no memory is counted.
So a run for each device gives the whole report of each, by the same code as for one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.devices import Device, is_meta, ordinal_of
from vramcast.virtual_gpu.cuda.sparse import storage_key

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.patches import Patches

_ACROSS_DEVICES = ("aten::copy_", "aten::_foreach", "aten::set_", "aten::_to_copy")
"""Operators that take tensors of several devices, or lists that torch groups by device."""


class _Local(threading.local):
    current = 0
    """The device of torch.cuda.set_device."""
    running: int | None = None
    """The device of the operator that runs."""
    forced: int | None = None
    """The device that a tensor is moved to."""


class SeveralDevices:
    """The devices of a process with more than one.

    Args:
        count: How many there are.
        observed: The ordinal of the one whose memory is traced.
    """

    def __init__(self, count: int, observed: int) -> None:
        self.count = count
        self.observed = observed
        self.local = _Local()
        self._ordinals: dict[int, int] = {}

    @property
    def ordinal(self) -> int:
        """Return the device that new storages are on now."""
        local = self.local
        if local.forced is not None:
            return local.forced
        return local.current if local.running is None else local.running

    @property
    def is_elsewhere(self) -> bool:
        """Return True where new storages are not on the observed device."""
        return self.ordinal != self.observed

    def add(self, key: int) -> None:
        """Note that a storage was made on the device of now."""
        self._ordinals[key] = self.ordinal

    def forget(self, key: int) -> None:
        """Note that a storage is gone."""
        self._ordinals.pop(key, None)

    def of_key(self, key: int) -> int:
        """Return the device of a storage."""
        return self._ordinals.get(key, self.observed)

    def of(self, tensor: Tensor) -> int:
        """Return the device of a tensor on one."""
        return self.of_key(storage_key(tensor))

    def resolved(self, device: Any) -> torch.device:
        """Return a device argument that names CUDA with its ordinal."""
        ordinal = ordinal_of(device)
        return Device("cuda", self.local.current if ordinal is None else ordinal)

    @contextmanager
    def moving_to(self, ordinal: int) -> Iterator[None]:
        """Let new storages be on a device."""
        before, self.local.forced = self.local.forced, ordinal
        try:
            yield
        finally:
            self.local.forced = before

    @contextmanager
    def running(self, func: Any, tensors: list[Tensor], device: Any) -> Iterator[None]:
        """Let an operator run on the device that it names, or on that of its tensors."""
        ordinals = dict.fromkeys(self._ordinals[key] for item in tensors if (key := self._key(item)) in self._ordinals)
        if len(ordinals) > 1 and not func._schema.name.startswith(_ACROSS_DEVICES):
            names = " and ".join(f"cuda:{ordinal}" for ordinal in ordinals)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {names}! (when "
                f"checking arguments in {func})"
            )
        before = self.local.running
        named = device.index if device is not None and device.type == "cuda" else None
        self.local.running = named if named is not None else next(iter(ordinals), before)
        try:
            yield
        finally:
            self.local.running = before

    @contextmanager
    def current(self, device: Any) -> Iterator[None]:
        """Let a device be the current one, as torch.cuda.device does; -1 and None leave it."""
        before = self.local.current
        ordinal = ordinal_of(device) if device is not None else None
        self.local.current = before if ordinal is None or ordinal < 0 else ordinal
        try:
            yield
        finally:
            self.local.current = before

    def moved(self, tensor: Tensor, ordinal: int, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a copy of a tensor on another device, whose gradient comes back."""
        source = self.of(tensor)

        def there(item: Tensor) -> Tensor:
            with self.moving_to(ordinal):
                return copy(item)

        def back(gradient: Tensor) -> Tensor:
            with self.moving_to(source):
                return gradient.to(tensor.dtype, copy=True)

        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return there(tensor)
        moved: Tensor = _Moved.apply(tensor, there, back)  # type: ignore[no-untyped-call]
        return moved

    def group(self, groups: dict[Any, Any]) -> dict[Any, Any]:
        """Split groups of tensors, which torch has made by type, by device."""
        split: dict[Any, Any] = {}
        for (device, dtype), (lists, indices) in groups.items():
            for place, tensor in enumerate(lists[0]):
                own = Device("cuda", self.of(tensor)) if is_meta(tensor) and device.type == "meta" else device
                columns, numbers = split.setdefault((own, dtype), ([[] for _ in lists], []))
                for column, values in zip(columns, lists, strict=True):
                    if values:
                        column.append(values[place])
                if indices:
                    numbers.append(indices[place])
        return split

    def _key(self, tensor: Tensor) -> int | None:
        return storage_key(tensor) if is_meta(tensor) else None


class _Moved(torch.autograd.Function):
    """Moves a tensor forward, and its gradient back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the copy."""
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient on the device of the original."""
        return ctx.back(gradient), None, None


def apply_communication(patches: "Patches") -> None:
    """Replace the C++ functions of torch.nn.parallel.comm, by which DataParallel moves tensors (torch 2.13)."""
    comm = torch.nn.parallel.comm

    def named(device: Any) -> torch.device:
        return Device("cuda", ordinal_of(device) or 0)

    def broadcast(tensor: Tensor, devices: Any = None, *, out: Any = None) -> tuple[Tensor, ...]:
        return tuple(tensor.to(target) for target in map(named, devices))

    def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = 0) -> list[tuple[Tensor, ...]]:
        return [tuple(item.to(target) for item in tensors) for target in map(named, devices)]

    def reduce_add(inputs: Any, destination: Any = None) -> Tensor:
        first, *others = (item.to(named(destination)) for item in inputs)
        total: Tensor = first.clone()
        for item in others:
            total += item
        return total

    def reduce_add_coalesced(inputs: Any, destination: Any = None, buffer_size: int = 0) -> tuple[Tensor, ...]:
        return tuple(reduce_add(items, destination) for items in zip(*inputs, strict=True))

    def scatter(
        tensor: Tensor, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, streams: Any = None, *,
        out: Any = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        chunks: Any = torch.split(tensor, chunk_sizes, dim) if chunk_sizes else tensor.chunk(len(devices), dim)
        return tuple(item.to(target) for item, target in zip(chunks, map(named, devices), strict=False))

    def gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Tensor:
        target = "cpu" if destination in (-1, "cpu") else named(destination)
        return torch.cat([item.to(target) for item in tensors], dim)

    fakes = (broadcast, broadcast_coalesced, reduce_add, reduce_add_coalesced, scatter, gather)
    for fake in fakes:
        patches.set(comm, fake.__name__, fake)
