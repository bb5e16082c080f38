"""torch.profiler: activities of CUDA are left out, since there are no kernels (checked on torch 2.13)."""

from typing import TYPE_CHECKING, Any

import torch.profiler
from torch.profiler import profiler

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Profile the host alone."""
    original: Any = profiler._KinetoProfile.__init__
    activity: Any = torch.profiler.ProfilerActivity

    def init(self: Any, *, activities: Any = None, **kwargs: Any) -> None:
        original(
            self, activities={item for item in activities or () if item != activity.CUDA} or {activity.CPU}, **kwargs
        )

    patches.set(profiler._KinetoProfile, "__init__", init)
