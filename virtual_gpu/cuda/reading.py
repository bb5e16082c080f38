"""Values that a script reads from the device: true where they are known, a benign placeholder where they are not.

Large tensors of unknown values read as zeros, whose pages take no memory.
"""

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.data_dependent import DYNAMIC
from vramcast.virtual_gpu.cuda.devices import CPU, META, is_meta
from vramcast.virtual_gpu.cuda.operators import aten, map_tensors, operator_of

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer

HOLLOW_FROM_ELEMENTS = 2**20
"""Parameters from this size on have no data on the host."""
_NOISE = 2**-4
"""Added to the placeholders of a tensor of floats: what is clustered or sorted has no equal rows."""


def placeholder(dtype: torch.dtype) -> float | int | bool:
    """Return what an unknown value of a type reads as."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 0


class Reader:
    """Copies from the device to the host."""

    def __init__(self, tracer: "ScriptTracer") -> None:
        self._tracer = tracer
        self._noise = torch.Generator().manual_seed(0)
        self.operators: dict[Any, Callable[[Any, Any], Any]] = {
            aten._local_scalar_dense.default: self._number,
            aten.is_nonzero.default: lambda args, kwargs: bool(self._number(args, kwargs)),
            aten.equal.default: self._equal,
            aten._to_copy.default: self._copied,
            aten.copy_.default: self._copied_into,
            aten._assert_async.default: lambda args, kwargs: None,
            aten._assert_async.msg: lambda args, kwargs: None,
            aten._amp_foreach_non_finite_check_and_unscale_.default: lambda args, kwargs: None,  # nothing overflows
        }

    def host_values(self, tensor: Tensor) -> Tensor:
        """Return the values of a device tensor on the host; a tensor without data where they are not known."""
        value = self._tracer.values.of(tensor)
        if value is not None:
            return value.clone()
        part = self._tracer.values.part_of(tensor) if self._tracer.values.has_part(tensor) else None
        if part is not None:
            self._note(tensor)
            return torch.where(part[1], part[0], torch.full((), placeholder(tensor.dtype), dtype=tensor.dtype))
        return self._tracer.adopt_hollow(torch.empty(tensor.shape, dtype=tensor.dtype, device=META))

    def filled(self, tensor: Tensor) -> Tensor:
        """Return a host tensor with data in the place of a hollow one."""
        self._note(tensor)
        if tensor.numel() >= HOLLOW_FROM_ELEMENTS:
            return _untouched(tensor)
        data = torch.full(tensor.shape, placeholder(tensor.dtype), dtype=tensor.dtype, device=CPU)
        if data.numel() > 1 and data.is_floating_point():  # rows differ, as those of weights do
            data += torch.rand(data.shape, generator=self._noise) * _NOISE
        return data

    def on_hollow(self, func: Any, args: Any, kwargs: Any, device: Any) -> Any:
        """Run a host operator on tensors without data."""
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default):
            return self._placeholder(args[0])
        if func is aten.equal.default:
            return False
        if func is aten.copy_.default and not is_meta(args[0]):
            return args[0].copy_(self.filled(args[0]))
        if operator_of(func).has_dynamic_shape or func in DYNAMIC:
            return func(*map_tensors(self._with_data, args), **map_tensors(self._with_data, kwargs))
        users_meta = device is not None and device.type == "meta"
        if device is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": META}
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        args, kwargs = (map_tensors(_without_data, item) for item in (args, kwargs))
        out = func(*args, **kwargs)
        return out if users_meta else map_tensors(self._tracer.adopt_hollow, out)

    def _with_data(self, tensor: Tensor) -> Tensor:
        return self.filled(tensor) if is_meta(tensor) else tensor

    def _number(self, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not is_meta(tensor):
            return NotImplemented
        value = self._tracer.values.of(tensor)
        return self._placeholder(tensor) if value is None else value.item()

    def _placeholder(self, tensor: Tensor) -> Any:
        self._note(tensor)
        return placeholder(tensor.dtype)

    def _note(self, tensor: Tensor) -> None:
        kind = str(tensor.dtype).removeprefix("torch.")
        self._tracer.assumptions.note(
            f"an unknown {kind} value was read from the device and taken as {placeholder(tensor.dtype)}"
        )

    def _equal(self, args: Any, kwargs: Any) -> Any:
        if args[0].shape != args[1].shape:
            return False
        values = [self._tracer.values.of(item) if is_meta(item) else item for item in args[:2]]
        if values[0] is None or values[1] is None:
            self._tracer.assumptions.note("two tensors with unknown values were compared and taken as different")
            return False
        return torch.equal(values[0], values[1])

    def _copied(self, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or device.type != "cpu" or not is_meta(args[0]):
            return NotImplemented
        value = self.host_values(args[0])
        dtype = kwargs.get("dtype")
        if is_meta(value):
            if dtype not in (None, value.dtype):
                value = self._tracer.adopt_hollow(torch.empty(value.shape, dtype=dtype, device=META))
            return value
        return value.to(dtype or args[0].dtype)

    def _copied_into(self, args: Any, kwargs: Any) -> Any:
        if is_meta(args[0]):
            return NotImplemented
        value = self.host_values(args[1])
        return args[0].copy_(self.filled(args[0]) if is_meta(value) else value)


def _untouched(like: Tensor) -> Tensor:
    """Return zeros in pages that take no memory until someone writes to them."""
    size_bytes = like.numel() * like.element_size()
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(like.shape)


def _without_data(tensor: Tensor) -> Tensor:
    return tensor if is_meta(tensor) else tensor.to(META)
