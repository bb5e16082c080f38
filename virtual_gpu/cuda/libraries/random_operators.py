"""DTensor's random operators: on a virtual GPU they are the operator that they wrap (checked on torch 2.13)."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Give the higher-order operators a rule for the dispatch mode of the virtual GPU: no state is read or set."""
    operator: Any = getattr(module, "run_dtensor_rng_op", None)
    if operator is None:
        return
    kind = type(gpu.tracer)

    def run(mode: Any, start: int, end: int, wrapped: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return wrapped(*args, **kwargs)

    operator.py_impl(kind)(run)

    def remove() -> None:
        operator.python_key_table.pop(kind, None)
        operator._dispatch_cache.clear()

    gpu.callbacks.callback(remove)


PATCHES = {"torch._prims.rng_prims": _apply}
