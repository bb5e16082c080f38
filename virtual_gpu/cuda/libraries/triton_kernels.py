"""Triton, itself or its stand-in: launches of kernels do nothing on tensors without data, but void known floats.

A kernel writes to tensors that its caller has allocated, so the memory of a step is complete without it. Checked on
Triton 3.9.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_LAUNCHERS = ("JITFunction", "Autotuner", "Heuristics")


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        gpu.tracer.values.forget_numbers(args, kwargs)

    for name in _LAUNCHERS:
        launcher = vars(module).get(name)
        if launcher is not None:
            patches.set(launcher, "run", launch)


PATCHES = {"triton": _apply, "triton.runtime.jit": _apply, "triton.runtime.autotuner": _apply}
