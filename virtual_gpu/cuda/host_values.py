"""True values of small device tensors, computed on the host beside the trace.

Indices, lengths, masks, loss scales and counters decide shapes and branches. Each storage on the device may have a
host storage of the same size; a view on the device reads and writes the same bytes on the host, so views agree
by construction. A write with unknown values voids the whole storage.
"""

from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.devices import CPU, is_meta
from vramcast.virtual_gpu.cuda.operators import (
    Operator,
    aten,
    map_tensors,
    operator_of,
    tensors_in,
    written_tensors,
)
from vramcast.virtual_gpu.cuda.sparse import is_sparse, storage_key

MOST_ELEMENTS = 2**20
"""The most elements of a tensor of whole numbers."""
MOST_TRUTHS = 2**24
"""Of a mask, such as one of the weights of a layer."""
MOST_FLOATS = 2**12
"""Of a tensor of floats that comes from the host."""
MOST_DERIVED_FLOATS = 2**16
_MOST_INPUT_ELEMENTS = 2**22
_VALUE_FREE_FACTORIES = frozenset({
    "aten::full", "aten::zeros", "aten::ones", "aten::arange", "aten::scalar_tensor", "aten::eye", "aten::linspace",
    "aten::tril_indices", "aten::triu_indices", "aten::randint", "aten::randperm", "aten::rand", "aten::randn",
})  # fmt: skip
_WITH_GENERATOR = {
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randperm.default: aten.randperm.generator,
    aten.rand.default: aten.rand.generator,
    aten.randn.default: aten.randn.generator,
}
"""Forms of random factories that take a generator."""
_LAYOUT_FREE = frozenset({"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros",
                          "aten::new_ones", "aten::new_full"})  # fmt: skip
_WHOLE_WRITES = frozenset({"aten::fill_", "aten::zero_"})


class HostValues:
    """Host copies of device storages, by the address of the storage."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._generator = torch.Generator().manual_seed(0)  # the GPU has its own: the host's stream is not touched

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a device tensor, None where they are not known."""
        if is_sparse(tensor):
            return None
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            return None
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def keep(self, tensor: Tensor, value: Tensor) -> None:
        """Remember values of a device tensor that owns its whole storage."""
        host = value
        if value.stride() != tensor.stride() or value.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                return
            host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(value)
        self._storages[storage_key(tensor)] = host.untyped_storage()

    def forget_storage(self, key: int) -> None:
        """Drop what is known of a storage."""
        self._storages.pop(key, None)

    def void(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """Forget the tensors that a call writes to."""
        if operator.written:
            for tensor in written_tensors(operator, args, kwargs):
                self._storages.pop(storage_key(tensor), None)

    def forget_numbers(self, args: Any, kwargs: Any) -> None:
        """Forget the floats in the arguments of a kernel, which may write to any of them; it reads whole numbers."""
        for tensor in tensors_in(args, kwargs):
            if is_meta(tensor) and tensor.is_floating_point() and not is_sparse(tensor):
                self._storages.pop(storage_key(tensor), None)

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the values of a call on device tensors; None voids what the call writes to."""
        func = _WITH_GENERATOR.get(func, func)
        operator = operator_of(func)
        value = self._computed(func, operator, args, kwargs)
        if value is None:
            self.void(operator, args, kwargs)
        return value

    def keep_all(self, out: Any, values: Any) -> None:
        """Remember the values of all outputs; those that alias a known storage are up to date already."""
        if isinstance(out, Tensor) and isinstance(values, Tensor):
            is_new = is_meta(out) and storage_key(out) not in self._storages
            if is_new and out.shape == values.shape and _worth_keeping(out):
                self.keep(out, values)
        elif isinstance(out, (list, tuple)) and isinstance(values, (list, tuple)):
            for item, value in zip(out, values, strict=False):
                self.keep_all(item, value)

    def _computed(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if operator.is_uninitialised:
            return _arbitrary(args, kwargs)
        if name in _LAYOUT_FREE:
            return self._like(func, args, kwargs)
        if operator.is_list or (operator.is_random and not operator.takes_generator):
            return None
        tensors = tensors_in(args, kwargs)
        if not tensors:
            dtype = kwargs.get("dtype") or (torch.int64 if name == "aten::randint" else None)
            if name not in _VALUE_FREE_FACTORIES or _factory_elements(name, args) > _most(dtype):
                return None
        elif not _becomes_mask(func, args, kwargs) and not self._all_known(
            tensors, args[0] if name in _WHOLE_WRITES or func is aten.copy_.default else None
        ):
            return None
        return self._run(func, operator, args, kwargs)

    def _all_known(self, tensors: list[Tensor], overwritten: Any) -> bool:
        total = 0
        for tensor in tensors:
            total += 0 if tensor.dtype is torch.bool else tensor.numel()
            if tensor.numel() > _most_known(tensor.dtype) or total > _MOST_INPUT_ELEMENTS:
                return False
            if is_sparse(tensor):
                return False
            if tensor is overwritten and self._owns(tensor):
                continue
            if is_meta(tensor) and storage_key(tensor) not in self._storages:
                return False
            if not is_meta(tensor) and tensor.is_floating_point() and tensor.numel() > MOST_FLOATS:
                return False
        return True

    def _owns(self, tensor: Tensor) -> bool:
        """Prepare a tensor that is overwritten whole: what was in it does not matter."""
        key, size = storage_key(tensor), tensor.numel() * tensor.element_size()
        if key in self._storages:
            return True
        if tensor.untyped_storage().nbytes() != size or not _worth_keeping(tensor) or tensor.storage_offset():
            return False
        self._storages[key] = torch.empty(size, dtype=torch.uint8).untyped_storage()
        return True

    def _run(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        host_args = map_tensors(self._host, args)
        host_kwargs = map_tensors(self._host, kwargs)
        if "device" in host_kwargs and host_kwargs["device"] is not None:
            host_kwargs["device"] = CPU
        if operator.takes_generator:
            host_kwargs["generator"] = self._generator
        try:
            return func(*host_args, **host_kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            return None  # the operator has no such form on the host, or the script's own error follows on the device

    def _host(self, tensor: Tensor) -> Tensor:
        value = self.of(tensor) if is_meta(tensor) else tensor
        if value is None:
            raise RuntimeError("the values of this tensor are not known")
        return value

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the values of a factory that takes its layout from a tensor, whose own values do not matter."""
        like = args[0]
        if like.numel() > _most(kwargs.get("dtype") or like.dtype):
            return None
        bare = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        return self._run(func, operator_of(func), (bare, *args[1:]), kwargs)


def _becomes_mask(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for a copy to the device as truth values, which the host converts (Copy.cu, copy_kernel_cuda)."""
    is_copy = func is aten._to_copy.default and kwargs.get("dtype") is torch.bool
    return is_copy and not is_meta(args[0]) and args[0].numel() <= MOST_TRUTHS


def _arbitrary(args: Any, kwargs: Any) -> Tensor | None:
    """Return zeros for new memory of whole numbers or truth values: any value would be as true."""
    like = args[0] if args and isinstance(args[0], Tensor) else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    shape = like.shape if like is not None and not (len(args) > 1 and isinstance(args[1], (list, tuple))) else None
    if shape is None:
        shape = args[1] if like is not None else args[0]
    elements = 1
    for size in shape:
        elements *= size
    if dtype.is_floating_point or dtype.is_complex or elements > _most_known(dtype):
        return None
    return torch.zeros(shape, dtype=dtype)


def _most(dtype: torch.dtype | None) -> int:
    return MOST_FLOATS if dtype is None or dtype.is_floating_point or dtype.is_complex else _most_known(dtype)


def _most_known(dtype: torch.dtype) -> int:
    return MOST_TRUTHS if dtype is torch.bool else MOST_ELEMENTS


def _worth_keeping(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (MOST_DERIVED_FLOATS if is_number else _most_known(tensor.dtype))


def _factory_elements(name: str, args: Any) -> int:
    """Return how many elements a factory makes."""
    first = args[0] if args else 0
    if name in ("aten::randint",):
        first = next((item for item in args if isinstance(item, (list, tuple))), ())
    if isinstance(first, (list, tuple)):
        count = 1
        for size in first:
            count *= size
        return count
    if name in ("aten::arange", "aten::linspace", "aten::randperm"):
        bounds = [item for item in args[:2] if isinstance(item, (int, float))]
        return int(bounds[-1] - (bounds[0] if len(bounds) > 1 else 0)) if name != "aten::linspace" else int(args[2])
    return 1
