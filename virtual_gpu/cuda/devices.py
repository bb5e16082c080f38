"""Device arguments: recognise those that name CUDA, whichever way torch lets a user spell them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from vramcast.virtual_gpu.operators.meta_tensors import function_modes, is_meta

Device = torch.device
"""The class of torch; while a script runs, `torch.device` also accepts ordinals (see patches/device_class.py)."""
META = Device("meta")
CPU = Device("cpu")

real_device: Callable[[Tensor], torch.device] = vars(torch._C.TensorBase)["device"].__get__


def names_cuda(value: Any) -> bool:
    """Return True for 'cuda', 'cuda:0', torch.device('cuda') and an ordinal."""
    if isinstance(value, str):
        return value.startswith("cuda")
    if isinstance(value, Device):
        return value.type == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def ordinal_of(value: Any) -> int | None:
    """Return the ordinal in a device argument that names CUDA, None where it leaves the choice open."""
    if isinstance(value, int):
        return value
    index: int | None = Device(value).index
    return index


def default_device() -> torch.device | None:
    """Return the device of `with torch.device(...)` or torch.set_default_device, None where there is neither."""
    if not function_modes():
        return None
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    contexts = (mode for mode in modes if isinstance(mode, DeviceContext))
    context = next(contexts, None)
    return context.device if context is not None else None


__all__ = ["CPU", "META", "Device", "default_device", "is_meta", "names_cuda", "ordinal_of", "real_device"]
