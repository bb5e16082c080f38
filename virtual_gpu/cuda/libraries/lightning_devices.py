"""Lightning on several devices: it would start a process for each; here one runs alone (checked on lightning 2.6)."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _environment(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Let Lightning believe that all ranks were started."""
    patches.set(module.LightningEnvironment, "creates_processes_externally", property(lambda _: True))


def _device_parser(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Have as many devices as the script asks for."""
    original: Any = module._sanitize_gpu_ids

    def sanitize(gpus: list[int], *args: Any, **kwargs: Any) -> list[int]:
        gpu.device_count = max(gpu.device_count, max(gpus, default=0) + 1)
        ids: list[int] = original(gpus, *args, **kwargs)
        return ids

    patches.set(module, "_sanitize_gpu_ids", sanitize)


_PACKAGES = ("lightning.fabric", "lightning_fabric")
PATCHES = {
    **{f"{package}.plugins.environments.lightning": _environment for package in _PACKAGES},
    **{f"{package}.utilities.device_parser": _device_parser for package in _PACKAGES},
}
