"""torch.Tensor and its storages: device tensors say that they are on CUDA (checked on torch 2.13)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.devices import CPU, is_meta, names_cuda, real_device
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_Base = torch._C.TensorBase
_TYPE_NAMES = {
    torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float64: "Double",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.bool: "Bool",
    torch.uint8: "Byte",
}  # fmt: skip


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace what tells where a tensor is, and what moves or prints it."""
    _attributes(patches, gpu)
    _moves(patches, gpu)
    _reads(patches, gpu)
    _data(patches, gpu)
    _storages(patches, gpu)


def _attributes(patches: Patches, gpu: "CudaEmulation") -> None:
    tracer = gpu.tracer
    on_device, hollow = tracer.looks_like_device, tracer.looks_hollow

    def device(self: Tensor) -> torch.device:
        if not is_meta(self):
            return real_device(self)
        return gpu.device_of(self) if on_device(self) else CPU if hollow(self) else real_device(self)

    patches.set(Tensor, "device", property(device))
    patches.set(Tensor, "is_cuda", property(on_device))
    patches.set(Tensor, "is_cpu", property(lambda self: device(self).type == "cpu"))
    patches.set(Tensor, "is_meta", property(lambda self: is_meta(self) and not on_device(self) and not hollow(self)))
    patches.set(Tensor, "get_device", lambda self: gpu.device_of(self).index if on_device(self) else -1)
    patches.set(Tensor, "record_stream", lambda self, stream: tracer.record_stream(self, stream.stream_id))
    patches.set(Tensor, "pin_memory", _pinned)
    patches.set(Tensor, "is_pinned", lambda self, device=None: self.__dict__.get("_is_pinned", False))
    real_pointer = _Base.data_ptr

    def data_ptr(self: Tensor) -> int:
        if not is_meta(self) or not self.numel():
            return real_pointer(self)
        return gpu.address_of(self.untyped_storage()) + int(self.storage_offset()) * self.element_size()

    patches.set(Tensor, "data_ptr", data_ptr)


def _pinned(self: Tensor, device: Any = None) -> Tensor:
    """Pinned memory is the host's: the tensor itself stands for its copy."""
    pinned = self.detach() if not self.__dict__.get("_is_pinned") else self
    pinned.__dict__["_is_pinned"] = True
    return pinned


def _moves(patches: Patches, gpu: "CudaEmulation") -> None:
    tracer = gpu.tracer
    real_to, real_type = _Base.to, Tensor.type

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = _without_other(args, kwargs)
        target = kwargs["device"] if "device" in kwargs else args[0] if args else None
        if names_cuda(target):
            wanted = gpu.resolved(target)
            if tracer.looks_like_device(self):
                return _between(gpu, self, wanted, real_to, *_without_device(args, kwargs))
            args, kwargs = _with_device(args, kwargs, wanted)
            return real_to(self, *args, **kwargs)
        if target in (None, "cpu", CPU):
            if tracer.looks_hollow(self):
                return _converted(self, real_to, *_without_device(args, kwargs))
        elif target == "meta" or (isinstance(target, torch.device) and target.type == "meta"):
            with gpu.users_meta():
                if tracer.is_device(self) or tracer.is_hollow(self):
                    dtype = _dtype(args, kwargs) or self.dtype
                    return torch.empty_like(self, dtype=dtype, device="meta", requires_grad=False)
                return real_to(self, *args, **kwargs)
        return real_to(self, *args, **kwargs)

    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            if tracer.looks_like_device(self):
                return f"torch.cuda.{_TYPE_NAMES[self.dtype]}Tensor"
            return f"torch.{_TYPE_NAMES[self.dtype]}Tensor" if tracer.looks_hollow(self) else real_type(self)
        name = dtype if isinstance(dtype, str) else getattr(dtype, "_legacy_name", "")
        if name.startswith("torch.cuda."):
            return to(self, "cuda", dtype=_dtype_named(name))
        return to(self, dtype=dtype) if isinstance(dtype, torch.dtype) else real_type(self, dtype, non_blocking)

    def cuda_(self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
        extra = {} if memory_format is None else {"memory_format": memory_format}
        return to(self, "cuda" if device is None else device, non_blocking=non_blocking, **extra)

    patches.set(Tensor, "to", to)
    patches.set(Tensor, "cuda", cuda_)
    patches.set(Tensor, "cpu", lambda self, **kwargs: to(self, CPU, **kwargs))
    patches.set(Tensor, "type", type_)


def _without_other(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Turn `to(other)` into `to(device, dtype)`."""
    if args and isinstance(args[0], Tensor):
        return (args[0].device, args[0].dtype, *args[1:]), kwargs
    if "other" in kwargs:
        other = kwargs.pop("other")
        return (other.device, other.dtype, *args), kwargs
    return args, kwargs


def _without_device(args: Any, kwargs: Any) -> tuple[Any, Any]:
    if "device" in kwargs:
        return args, {name: value for name, value in kwargs.items() if name != "device"}
    return args[1:], kwargs


def _with_device(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    return (args, {**kwargs, "device": device}) if "device" in kwargs else ((device, *args[1:]), kwargs)


def _dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    named = kwargs.get("dtype")
    return named or next((item for item in args if isinstance(item, torch.dtype)), None)


def _dtype_named(name: str) -> torch.dtype:
    return next(dtype for dtype, text in _TYPE_NAMES.items() if name == f"torch.cuda.{text}Tensor")


def _between(gpu: "CudaEmulation", self: Tensor, wanted: torch.device, real_to: Any, args: Any, kwargs: Any) -> Tensor:
    """Convert a tensor on a device, and move it if that is not the wanted one."""
    if gpu.several is None or gpu.several.of(self) == wanted.index:
        return _converted(self, real_to, args, kwargs)
    kwargs = {**kwargs, "copy": True}
    return gpu.several.moved(self, wanted.index, lambda item: _converted(item, real_to, args, kwargs))


def _converted(self: Tensor, real_to: Any, args: Any, kwargs: Any) -> Tensor:
    """Convert a tensor that is on the wanted device already."""
    dtype = _dtype(args, kwargs) or self.dtype
    flags = [item for item in args if isinstance(item, bool)]
    copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    result: Tensor = real_to(self, dtype=dtype, copy=copy, memory_format=memory_format)
    return result


def _reads(patches: Patches, gpu: "CudaEmulation") -> None:
    tracer = gpu.tracer
    real_numpy, real_tolist = _Base.numpy, _Base.tolist
    real_repr: Any = Tensor.__repr__
    real_format: Any = Tensor.__format__
    real_array: Any = Tensor.__array__

    def on_host(self: Tensor) -> Tensor:
        """Return a tensor with data, for code that reads it without an operator."""
        host = self.cpu() if tracer.looks_like_device(self) else self
        return gpu.filled(host) if tracer.looks_hollow(host) else host

    def numpy(self: Tensor, **kwargs: Any) -> Any:
        if tracer.looks_like_device(self) and not kwargs.get("force"):
            raise TypeError(
                f"can't convert {gpu.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return real_numpy(on_host(self), **kwargs)

    def array(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tracer.looks_like_device(self):
            return numpy(self)
        return real_array(on_host(self), *args, **kwargs)

    def repr_(self: Tensor, *, tensor_contents: Any = None) -> str:
        if not tracer.looks_like_device(self) and not tracer.looks_hollow(self):
            text: str = real_repr(self, tensor_contents=tensor_contents)
            return text
        content = f"{self.item()}" if self.dim() == 0 else f"..., size={tuple(self.shape)}"
        where = f", device='{self.device}'" if self.device.type == "cuda" else ""
        return f"tensor({content}{where}, dtype={self.dtype})"

    def format_(self: Tensor, spec: str) -> str:
        if is_meta(self) and self.dim() == 0 and (tracer.looks_like_device(self) or tracer.looks_hollow(self)):
            return format(self.item(), spec)
        text: str = real_format(self, spec)
        return text

    patches.set(Tensor, "numpy", numpy)
    patches.set(Tensor, "__array__", array)
    patches.set(Tensor, "tolist", lambda self: real_tolist(on_host(self)))
    patches.set(Tensor, "__repr__", repr_)
    patches.set(Tensor, "__format__", format_)


def _data(patches: Patches, gpu: "CudaEmulation") -> None:
    """Let `parameter.data = moved` keep the parameter's identity: nn.Module.to relies on it."""
    real_data = vars(_Base)["data"]

    def set_data(self: Tensor, new: Tensor) -> None:
        if is_meta(self) == is_meta(new) and self.is_inference() == new.is_inference():
            real_data.__set__(self, new)
            return
        moved = new.detach()
        if self.requires_grad:
            moved.requires_grad_(True)
        gradient = self.grad
        torch._C._swap_tensor_impl(self, moved)
        if gradient is not None:
            self.grad = gradient.to(self.device)

    patches.set(Tensor, "data", property(real_data.__get__, set_data))
    real_compatible = torch._has_compatible_shallow_copy_type

    def compatible(input: Tensor, from_: Tensor) -> bool:
        return is_meta(input) != is_meta(from_) or real_compatible(input, from_)

    patches.set(torch, "_has_compatible_shallow_copy_type", compatible)


def _storages(patches: Patches, gpu: "CudaEmulation") -> None:
    storage, tracer = torch.UntypedStorage, gpu.tracer
    live, hollow = tracer._live, tracer.hollow
    real_pointer, real_device_of = storage.data_ptr, storage.device
    real_clone: Any = storage.clone
    real_resize = storage.resize_

    def outside(self: Any) -> bool:
        return not tracer.local.depth and self._cdata in live

    def device(self: Any) -> torch.device:
        if outside(self):
            return gpu.device if gpu.several is None else torch.device("cuda", gpu.several.of_key(self._cdata))
        real: torch.device = real_device_of.__get__(self)
        return CPU if not tracer.local.depth and self._cdata in hollow else real

    def clone(self: Any) -> Any:
        if not outside(self):
            return real_clone(self)
        return torch.empty(self.nbytes(), dtype=torch.uint8, device=gpu.device).untyped_storage()

    def resize(self: Any, size: int) -> Any:
        before_bytes = self.nbytes()
        resized = real_resize(self, size)
        if self._cdata in live and self.nbytes() != before_bytes:
            tracer.resized(self)
        return resized

    patches.set(storage, "data_ptr", lambda self: gpu.address_of(self) if self._cdata in live else real_pointer(self))
    patches.set(storage, "device", property(device))
    patches.set(storage, "is_cuda", property(outside))
    patches.set(storage, "clone", clone)
    patches.set(storage, "resize_", resize)
    patches.set(storage, "cuda", lambda self, *args, **kwargs: self if outside(self) else gpu.moved_storage(self))
