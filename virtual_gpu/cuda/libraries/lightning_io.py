"""Lightning: it saves a checkpoint to a buffer and copies that to a file (checked on lightning 2.6)."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.patches.saving import has_hollow_data

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    original: Any = module._atomic_save

    def atomic_save(checkpoint: dict[str, Any], filepath: Any) -> None:
        if has_hollow_data(checkpoint) and not gpu.files_are_protected:
            gpu.keep_checkpoint(checkpoint, filepath)
        else:
            original(checkpoint, filepath)

    for other in list(sys.modules.values()):  # those that imported the function before
        if getattr(other, "__dict__", {}).get("_atomic_save") is original:
            patches.set(other, "_atomic_save", atomic_save)


PATCHES = {f"{package}.utilities.cloud_io": _apply for package in ("lightning.fabric", "lightning_fabric")}
