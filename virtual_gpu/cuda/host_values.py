"""True values of small device tensors, computed on the host beside the trace.

Indices, lengths, masks, loss scales and counters decide shapes and branches. Each storage on the device may have a
host storage of the same size; a view on the device reads and writes the same bytes on the host, so views agree
by construction. A write with unknown values voids the whole storage, or of truth values and whole numbers the part that
it writes to (see partial_values.py).
"""

from dataclasses import dataclass
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
from vramcast.virtual_gpu.cuda.partial_values import Part, part_of, rule_for, rule_in_place, unknown
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


@dataclass(frozen=True)
class _Partly:
    """A result of which a part is known."""

    values: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _Mask:
    """Which elements of a storage are known."""

    storage: torch.UntypedStorage
    element_bytes: int


class HostValues:
    """Host copies of device storages, by the address of the storage."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._masks: dict[int, _Mask] = {}
        """Masks of storages that are known in part."""
        self._generator = torch.Generator().manual_seed(0)  # the GPU has its own: the host's stream is not touched

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a device tensor, None where they are not known."""
        if is_sparse(tensor):
            return None
        key = storage_key(tensor)
        storage = self._storages.get(key)
        if storage is None or (key in self._masks and not self._is_unmasked(tensor)):
            return None
        return _view(storage, tensor.dtype, tensor)

    def part_of(self, tensor: Tensor) -> Part | None:
        """Return the values of a device tensor and a mask of those that are known, None where none is."""
        storage = None if is_sparse(tensor) else self._storages.get(storage_key(tensor))
        if storage is None:
            return None
        mask = self._masks.get(storage_key(tensor))
        if mask is None:
            return _view(storage, tensor.dtype, tensor), torch.ones(tensor.shape, dtype=torch.bool)
        if mask.element_bytes != tensor.element_size():
            return None
        return _view(storage, tensor.dtype, tensor), _view(mask.storage, torch.bool, tensor)

    def has_part(self, tensor: Tensor) -> bool:
        """Return True if any value of a device tensor is known."""
        part = self.part_of(tensor)
        return part is not None and bool(part[1].any())

    def _is_unmasked(self, tensor: Tensor) -> bool:
        part = self.part_of(tensor)
        return part is not None and bool(part[1].all())

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if all values of a device tensor are known."""
        key = storage_key(tensor)
        return key in self._storages and (key not in self._masks or self._is_unmasked(tensor))

    def keep(self, tensor: Tensor, value: Tensor) -> None:
        """Remember values of a device tensor that owns its whole storage."""
        host = value
        if value.stride() != tensor.stride() or value.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                return
            host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(value)
        self._storages[storage_key(tensor)] = host.untyped_storage()
        self._masks.pop(storage_key(tensor), None)

    def forget_storage(self, key: int) -> None:
        """Drop what is known of a storage."""
        self._storages.pop(key, None)
        self._masks.pop(key, None)

    def void(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """Forget the tensors that a call writes to."""
        if operator.written:
            for tensor in written_tensors(operator, args, kwargs):
                self._void(tensor)

    def _void(self, tensor: Tensor) -> None:
        """Forget the values of a tensor; of a storage of whole numbers, the rest stays known."""
        key, size = storage_key(tensor), tensor.element_size()
        storage = self._storages.get(key)
        is_part = storage is not None and tensor.numel() * size < storage.nbytes() and not tensor.is_floating_point()
        if not is_part or storage is None or storage.nbytes() > size * MOST_ELEMENTS:
            self.forget_storage(key)
            return
        self._mark(tensor, torch.zeros((), dtype=torch.bool))

    def _mark(self, tensor: Tensor, mask_of_known: Tensor) -> None:
        """Note which elements of a tensor are known."""
        key, size = storage_key(tensor), tensor.element_size()
        mask = self._masks.get(key)
        if mask is None:
            whole = torch.ones(self._storages[key].nbytes() // size, dtype=torch.bool)
            mask = self._masks[key] = _Mask(whole.untyped_storage(), size)
        if mask.element_bytes != size:
            self.forget_storage(key)
        else:
            _view(mask.storage, torch.bool, tensor).copy_(mask_of_known)

    def forget_numbers(self, args: Any, kwargs: Any) -> None:
        """Forget the floats in the arguments of a kernel, which may write to any of them; it reads whole numbers."""
        for tensor in tensors_in(args, kwargs):
            if is_meta(tensor) and tensor.is_floating_point() and not is_sparse(tensor):
                self.forget_storage(storage_key(tensor))

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the values of a call on device tensors; None voids what the call writes to."""
        func = _WITH_GENERATOR.get(func, func)
        operator = operator_of(func)
        value = self._computed(func, operator, args, kwargs)
        if value is None:
            value = self._computed_in_part(func, args, kwargs)
        elif self._masks and operator.written:
            for tensor in written_tensors(operator, args, kwargs):
                if storage_key(tensor) in self._masks:
                    self._mark(tensor, torch.ones((), dtype=torch.bool))
        if value is None:
            self.void(operator, args, kwargs)
        return value

    def _computed_in_part(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a result by three-valued logic, None if nothing of it is known."""
        rule = rule_for(func)
        in_place = None if rule else rule_in_place(func)
        if not (rule or in_place) or not self._storages:
            return None
        tensors = tensors_in(args, kwargs)
        if not all(map(_may_be_partial, tensors)) or not any(map(self._may_have_part, tensors)):
            return None
        try:
            part = (rule or in_place)(*map_tensors(self._part, args), **kwargs)  # type: ignore[misc]
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None  # a form of the operator that the rule does not know
        if part is None or not bool(part[1].any()):
            return None
        if in_place:
            return part[0] if self._overwrite(args[0], part) else None
        return part[0] if bool(part[1].all()) else _Partly(*part)

    def _may_have_part(self, tensor: Tensor) -> bool:
        return not is_meta(tensor) or storage_key(tensor) in self._storages

    def _part(self, tensor: Tensor) -> Part:
        if not is_meta(tensor):
            return part_of(tensor)
        return self.part_of(tensor) or unknown(tensor)

    def assume(self, tensor: Tensor, value: int) -> bool:
        """Take the unknown values of a tensor for a number; return False where they cannot be kept."""
        if tensor.numel() > MOST_ELEMENTS:
            return False
        values, mask = self.part_of(tensor) or unknown(tensor)
        return self._overwrite(tensor, (torch.where(mask, values, value), torch.ones_like(mask)))

    def _overwrite(self, tensor: Tensor, part: Part) -> bool:
        """Write values into a tensor of which a part is then known."""
        key = storage_key(tensor)
        if key not in self._storages and not self._owns(tensor):
            return False
        _view(self._storages[key], tensor.dtype, tensor).copy_(part[0])
        self._mark(tensor, part[1])
        return True

    def keep_all(self, out: Any, values: Any) -> None:
        """Remember the values of all outputs; those that alias a known storage are up to date already."""
        if isinstance(values, _Partly):
            if isinstance(out, Tensor) and is_meta(out) and out.shape == values.values.shape and _worth_keeping(out):
                self.keep(out, values.values)
                if storage_key(out) in self._storages:
                    self._mark(out, values.mask)
        elif isinstance(out, Tensor) and isinstance(values, Tensor):
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
            if is_meta(tensor) and not self.is_known(tensor):
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
        try:
            host_args = map_tensors(self._host, args)
            host_kwargs = map_tensors(self._host, kwargs)
            if "device" in host_kwargs and host_kwargs["device"] is not None:
                host_kwargs["device"] = CPU
            if operator.takes_generator:
                host_kwargs["generator"] = self._generator
            return func(*host_args, **host_kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError, KeyError):
            return None  # the operator has no such form on the host, or the script's own error follows on the device

    def _host(self, tensor: Tensor) -> Tensor:
        """Return the host's copy; of a tensor that is overwritten the old values need not be known."""
        if not is_meta(tensor):
            return tensor
        return _view(self._storages[storage_key(tensor)], tensor.dtype, tensor)

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the values of a factory that takes its layout from a tensor, whose own values do not matter."""
        like = args[0]
        if like.numel() > _most(kwargs.get("dtype") or like.dtype):
            return None
        bare = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        return self._run(func, operator_of(func), (bare, *args[1:]), kwargs)


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return a view of a host storage in the layout of a device tensor."""
    return torch.empty(0, dtype=dtype).set_(storage, like.storage_offset(), like.size(), like.stride())


def _may_be_partial(tensor: Tensor) -> bool:
    """Return True for a tensor whose elements may be known one by one."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.numel() <= MOST_ELEMENTS and not is_sparse(tensor)


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
