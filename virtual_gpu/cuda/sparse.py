"""Sparse gradients on the device: COO tensors, whose indices and values have storages of their own.

Duplicate indices are not merged, since they are not known: a coalesced tensor is as large as the one before, which is
the upper bound (native/sparse/cuda/SparseCUDATensor.cu, _coalesce_sparse_cuda).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vramcast.virtual_gpu.cuda.operators import aten
from vramcast.virtual_gpu.tracing.trace import in_backward

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer


def is_sparse(tensor: Tensor) -> bool:
    """Return True for a COO tensor."""
    return tensor.layout is torch.sparse_coo


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; of a sparse tensor, that of its values; in vmap, that of the batch."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return storage_key(torch._C._functorch.get_unwrapped(tensor))
        with _disable_current_modes():
            key = tensor._values().untyped_storage()._cdata
    return key


class SparseOperators:
    """Operators on sparse device tensors that torch cannot run on meta."""

    def __init__(self, tracer: "ScriptTracer") -> None:
        self._tracer = tracer
        self.operators: dict[Any, Callable[[Any, Any], Any]] = {
            aten._coalesce.default: lambda args, kwargs: self._like(args[0]),
            aten.clone.default: lambda args, kwargs: self._clone(args[0]) if is_sparse(args[0]) else NotImplemented,
            aten.sparse_mask.default: self._mask,
            aten._to_dense.default: self._dense,
            aten.add_.Tensor: lambda args, kwargs: args[0] if _adds_sparse(args) else NotImplemented,
            aten.add.Tensor: lambda args, kwargs: self._sum(args) if _adds_sparse(args) else NotImplemented,
            aten.mul_.Tensor: lambda args, kwargs: args[0] if is_sparse(args[0]) else NotImplemented,
        }

    def _like(self, tensor: Tensor) -> Tensor:
        indices, values = (torch.empty_like(item) for item in (tensor._indices(), tensor._values()))
        return self._made(indices, values, tensor.shape)

    def _clone(self, tensor: Tensor) -> Tensor:
        """Copy a tensor; autograd adopts a new gradient without a copy, but not under a mode (accumulate_grad.h)."""
        if in_backward():
            return self._made(tensor._indices(), tensor._values(), tensor.shape)
        return self._like(tensor)

    def _mask(self, args: Any, kwargs: Any) -> Tensor:
        dense, mask = args[:2]
        return self._made(mask._indices(), torch.empty_like(mask._values(), dtype=dense.dtype), dense.shape)

    def _dense(self, args: Any, kwargs: Any) -> Tensor:
        return self._tracer.see(torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"))

    def _sum(self, args: Any) -> Tensor:
        dense, sparse = args[:2]
        if not is_sparse(dense):
            return self._tracer.see(torch.empty_like(dense))
        parts = [(item._indices(), item._values()) for item in (dense, sparse)]
        return self._made(torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts]), dense.shape)

    def _made(self, indices: Tensor, values: Tensor, shape: Any) -> Tensor:
        made = torch.sparse_coo_tensor(indices, values, shape, device="meta", check_invariants=False)
        return self._tracer.see(made._coalesced_(True))


def _adds_sparse(args: Any) -> bool:
    return isinstance(args[1], Tensor) and (is_sparse(args[0]) or is_sparse(args[1]))
