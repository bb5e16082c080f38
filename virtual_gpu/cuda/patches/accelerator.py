"""torch.accelerator, generators and autocast queries: CUDA is the accelerator (checked on torch 2.13)."""

from typing import TYPE_CHECKING, Any

import torch

from vramcast.virtual_gpu.cuda.devices import Device
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace the functions that ask for the accelerator or for autocast's state on CUDA."""
    cuda = torch.cuda
    functions: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: gpu.device_count,
        "current_accelerator": lambda check_available=False: Device("cuda"),
        "current_device_index": lambda: gpu.device.index, "current_device_idx": lambda: gpu.device.index,
        "set_device_index": gpu.check_ordinal,
        "set_device_idx": gpu.check_ordinal, "synchronize": lambda device=None: gpu.streams.synchronize(),
        "current_stream": lambda device=None: gpu.streams.current, "set_stream": gpu.streams.set,
        "empty_cache": cuda.empty_cache, "device_index": cuda.device,
        "get_device_capability": cuda.get_device_capability,
    }  # fmt: skip
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        functions[name] = getattr(cuda, name)
    for name in ("memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        functions[name] = getattr(cuda, name)
    functions["get_memory_info"] = cuda.mem_get_info
    patches.set_where_present(torch.accelerator, functions)
    if hasattr(torch.accelerator, "memory"):
        patches.set_where_present(torch.accelerator.memory, functions)
    names = ("_accelerator_getAccelerator", "_get_accelerator")  # the second one chooses the mesh of FSDP2
    patches.set_where_present(torch._C, dict.fromkeys(names, lambda check=None: Device("cuda")))
    patches.set(torch, "Generator", _Generator)
    _autocast(patches)
    _groups(patches, gpu)


class _Generator(torch._C.Generator):
    """A generator that may report the device as its own; its numbers come from the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made: Any = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        made.__dict__["named"] = Device("cuda", device) if isinstance(device, int) else Device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> Any:  # type: ignore[override]
        """Return the device that the generator was made for."""
        return self.__dict__["named"]


def _autocast(patches: Patches) -> None:
    """Autocast on CUDA borrows the switches of the CPU, see virtual_gpu/operators/autocast.py."""
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    chosen = [torch.float16]

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def get_dtype(device_type: str) -> torch.dtype:
        if device_type != "cuda":
            return dtype_of(device_type)
        return dtype_of("cpu") if enabled("cpu") else chosen[0]

    def set_on(*args: Any) -> None:
        device_type, on = args if len(args) == 2 else ("cuda", args[0])
        set_enabled("cpu" if device_type == "cuda" else device_type, on)

    def set_type(device_type: str, dtype: torch.dtype) -> None:
        if device_type == "cuda":
            chosen[0] = dtype
        set_dtype("cpu" if device_type == "cuda" else device_type, dtype)

    patches.set(torch, "is_autocast_enabled", is_enabled)
    patches.set(torch, "get_autocast_dtype", get_dtype)
    patches.set(torch, "set_autocast_enabled", set_on)
    patches.set(torch, "set_autocast_dtype", set_type)
    patches.set(torch, "get_autocast_gpu_dtype", lambda: get_dtype("cuda"))
    for owner in (torch.amp.autocast_mode, torch.amp):
        patches.set(owner, "is_autocast_available", lambda device_type: True)


def _groups(patches: Patches, gpu: "CudaEmulation") -> None:
    """Report the virtual device when optimizers group tensors by device, where C++ would report 'meta'."""
    original = torch._C._group_tensors_by_device_and_dtype

    def grouped(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        if gpu.several is not None:
            return gpu.several.group(groups)
        return {
            (gpu.device if device is not None and device.type == "meta" else device, dtype): tensors
            for (device, dtype), tensors in groups.items()
        }

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", grouped)
