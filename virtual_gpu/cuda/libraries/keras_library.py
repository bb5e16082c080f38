"""Keras 3 on the torch backend: its optimizers are not those of torch (checked on keras 3.15)."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Count the steps of Keras optimizers, and mark their states."""
    optimizer: Any = module.BaseOptimizer
    original = optimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        gpu.record.begin_step()
        result = original(self, grads, trainable_variables)
        weights = [item.value for item in getattr(self, "_trainable_variables", ())]
        gpu.record.end_step(self, weights, grads, [item.value for item in self.variables])
        return result

    patches.set(optimizer, "apply", apply)


def _use_device(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Let Keras choose the virtual GPU, also if it was imported before."""
    patches.set(module, "DEFAULT_DEVICE", "cuda")


PATCHES = {"keras.src.optimizers.base_optimizer": _apply, "keras.src.backend.torch.core": _use_device}
