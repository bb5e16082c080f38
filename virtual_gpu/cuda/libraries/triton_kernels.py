"""Triton itself, where it is installed: launches of its kernels do nothing on tensors without data.

A kernel writes to tensors that its caller has allocated, so the memory of a step is complete without it. Checked on
Triton 3.9.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda

_LAUNCHERS = ("JITFunction", "Autotuner", "Heuristics")


def _launch_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _apply(module: ModuleType, patches: Patches, gpu: "VirtualCuda") -> None:
    for name in _LAUNCHERS:
        launcher = vars(module).get(name)
        if launcher is not None:
            patches.set(launcher, "run", _launch_nothing)


PATCHES = {"triton.runtime.jit": _apply, "triton.runtime.autotuner": _apply}
