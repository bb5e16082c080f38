"""Functions that make tensors: ordinals as devices, pinned memory, and values from Python (checked on torch 2.13)."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from vramcast.virtual_gpu.cuda.devices import default_device, names_cuda
from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.sparse import is_sparse

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_FROM_SHAPES = [
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "logspace",
    "eye",
    "empty_strided",
    "scalar_tensor",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "tril_indices",
    "triu_indices",
    "hann_window",
    "hamming_window",
    "blackman_window",
    "bartlett_window",
    "kaiser_window",
    "empty_permuted",
    "range",
]
_FROM_VALUES = ("tensor", "as_tensor", "asarray")
_METHODS = ["new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"]


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Wrap the factories of torch and the `new_*` methods."""
    _device_constructors()  # cached: `with torch.device(...)` must know the functions of torch
    for name in _FROM_SHAPES:
        patches.set(torch, name, _from_shape(gpu, getattr(torch, name)))
    for name in ("fftfreq", "rfftfreq"):
        patches.set(torch.fft, name, _from_shape(gpu, getattr(torch.fft, name)))
    patches.set(torch, "sparse_coo_tensor", _sparse(gpu, torch.sparse_coo_tensor))
    for name in _FROM_VALUES:
        patches.set(torch, name, _from_values(gpu, getattr(torch, name)))
    patches.set(Tensor, "new", _legacy_new(gpu, Tensor.new))
    patches.set(Tensor, "_make_wrapper_subclass", staticmethod(_wrapper(Tensor._make_wrapper_subclass)))
    for name in _METHODS:
        wrap = _new_tensor if name == "new_tensor" else _from_shape
        patches.set(Tensor, name, wrap(gpu, getattr(Tensor, name)))


def _wrapper(original: Any) -> Any:
    """Put a tensor that only wraps others on meta: torch without CUDA runs no operator on one of CUDA."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "device": "meta"} if names_cuda(kwargs.get("device")) else kwargs)

    return make


def _is_meta_name(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and str(device).startswith("meta")


def _from_shape(gpu: "CudaEmulation", original: Any) -> Any:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        pinned = kwargs.pop("pin_memory", False)
        if names_cuda(device):
            kwargs["device"] = gpu.resolved(device)
        elif _is_meta_name(default_device() if device is None else device):
            with gpu.users_meta():
                return original(*args, **kwargs)
        made = original(*args, **kwargs)
        return made.pin_memory() if pinned else made

    return make


def _from_values(gpu: "CudaEmulation", original: Any) -> Any:
    """Make a tensor on the host and move it: its values stay known."""

    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        pinned = kwargs.pop("pin_memory", False)
        if device is None and not isinstance(data, Tensor):
            device = default_device()
        if not names_cuda(device):
            if _is_meta_name(device):
                with gpu.users_meta():
                    return original(data, *args, **kwargs)
            made = original(data, *args, **kwargs)
            return made.pin_memory() if pinned else made
        resolved = gpu.resolved(device)
        requires_grad = kwargs.pop("requires_grad", False)
        kwargs["device"] = None if isinstance(data, Tensor) else "cpu"
        moved = original(data, *args, **kwargs).to(resolved)
        return moved.requires_grad_(True) if requires_grad else moved

    return make


def _sparse(gpu: "CudaEmulation", original: Any) -> Any:
    """Make a sparse tensor where its values are: torch would look at the device in C++, which is meta."""

    @functools.wraps(original)
    def make(indices: Any, values: Any = None, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        on_device = isinstance(values, Tensor) and values.is_cuda
        if not names_cuda(device) and not (device is None and on_device):
            return original(indices, *([] if values is None else [values]), *args, **kwargs)
        indices, values = (torch.as_tensor(item, device=gpu.device) for item in (indices, values))
        return original(indices, values, *args, **{**kwargs, "device": "meta"})

    return make


def _legacy_new(gpu: "CudaEmulation", original: Any) -> Any:
    """Let the old constructor Tensor.new, which optimizers call on sparse gradients, make tensors on the device."""

    @functools.wraps(original)
    def make(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_cuda:
            return original(self, *args, **kwargs)
        if is_sparse(self):
            return torch.sparse_coo_tensor(*args, dtype=self.dtype, device=gpu.device)
        if args and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return torch.tensor(args[0], dtype=self.dtype, device=gpu.device)
        shape = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.empty(shape, dtype=self.dtype, device=gpu.device)

    return make


def _new_tensor(gpu: "CudaEmulation", original: Any) -> Any:
    @functools.wraps(original)
    def make(self: Tensor, data: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("dtype", self.dtype)
        if kwargs["dtype"] is None:
            kwargs["dtype"] = self.dtype
        kwargs.setdefault("device", self.device)
        return torch.tensor(data, **kwargs)

    return make
