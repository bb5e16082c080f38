"""A tracer for one rank: it sees local tensors under DTensor, collectives without communication, and host copies."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from vramcast.virtual_gpu.distributed.parallelism import NOT_DISTRIBUTED
from vramcast.virtual_gpu.tracing.trace import Tracer

aten = torch.ops.aten


class RankTracer(Tracer):  # type: ignore[no-untyped-call]
    """A tracer that a fake process group runs under."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_silent():
            return func(*args, **kwargs)
        out = distributed_result(func, types, args, kwargs)
        if out is not NOT_DISTRIBUTED:
            return out
        if func is aten._to_copy.default and args[0].is_meta and _is_host(kwargs.get("device")):
            return _on_host(args[0], kwargs.get("dtype"))
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # a copy to the host, whose values nobody reads
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, tensor: Tensor) -> Tensor:
        """Note the allocation of a tensor's local storage."""
        super().see(local_tensor(tensor))
        return tensor

    def ignore(self, tensor: Tensor) -> None:
        """Leave the storage of a tensor out of the trace."""
        storage, live = tensor.untyped_storage(), self._live
        key = storage._cdata
        live[key] = (None, weakref.ref(storage, lambda _: live.pop(key)))

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the block that holds the local part of a tensor."""
        return super().block_of(local_tensor(tensor))


def distributed_result(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a collective or an operator on DTensors, else NOT_DISTRIBUTED."""
    if any(issubclass(item, (DTensor, AsyncCollectiveTensor)) for item in types):
        return NotImplemented  # the subclass unwraps itself, and the tracer sees the local operators
    if func.namespace == "c10d":
        return _without_communication(func, args, kwargs)
    if func is torch.ops._c10d_functional.wait_tensor.default or "_wrap_tensor" in func.name():
        return args[0]
    return NOT_DISTRIBUTED


def local_tensor(tensor: Any) -> Tensor:
    """Return the tensor on this rank behind a DTensor or a pending collective."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.elem
    local: Tensor = tensor
    return local


def _without_communication(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on empty tensors and return its Work with the real outputs.

    Before torch 2.13 collectives have no meta kernels. They write into their arguments and allocate nothing.
    """
    empty_args, empty_kwargs = tree_map_only(
        Tensor, lambda item: torch.empty(0, dtype=item.dtype), (args, kwargs)
    )  # fmt: skip
    out = func(*empty_args, **empty_kwargs)
    return (args[0], out[1]) if isinstance(out, tuple) else out


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _on_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a host tensor of the same shape. Its pages are never written, so they take no memory."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")
