"""bitsandbytes: its operators have fake kernels; its compiled library is not needed (checked on 0.50)."""

import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Do without managed memory, which is the host's: paged optimizers keep their state there."""

    def paged(*shape: int, dtype: Any = None, device: Any = None) -> Any:
        gpu.assumptions.note_once("paged optimizer states of bitsandbytes are in the memory of the host")
        import torch  # noqa: PLC0415

        buffer: Any = torch.zeros(*shape, dtype=dtype)
        buffer.is_paged = True
        return buffer

    if hasattr(module, "get_paged"):
        patches.set(module, "get_paged", paged)
        patches.set(module, "fill", lambda tensor, value, *_, **__: tensor.fill_(value))
        patches.set(module, "prefetch_tensor", lambda *_, **__: None)


def _quiet(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Leave out the traceback of a compiled library that does not load where there is no CUDA."""
    logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL)


PATCHES = {"bitsandbytes.cuda_specs": _quiet, "bitsandbytes.functional": _apply}
