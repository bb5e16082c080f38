"""torch.device: an ordinal names a CUDA device, as on a machine with GPUs (checked on torch 2.13)."""

from typing import TYPE_CHECKING, Any

import torch

from vramcast.virtual_gpu.cuda.devices import Device
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


class _DeviceClass(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            return Device("cuda", args[0])
        return Device(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Device)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return subclass is Device or super().__subclasscheck__(subclass)

    def __eq__(cls, other: object) -> bool:
        return other is Device or other is cls

    def __hash__(cls) -> int:
        return hash(Device)


class _OrdinalDevice(metaclass=_DeviceClass):
    """Stands for torch.device; its instances are those of torch."""


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace torch.device."""
    _OrdinalDevice.__module__, _OrdinalDevice.__qualname__, _OrdinalDevice.__name__ = "torch", "device", "device"
    patches.set(torch, "device", _OrdinalDevice)
