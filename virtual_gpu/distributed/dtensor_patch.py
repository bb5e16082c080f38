"""DTensor derives output shapes by running operators on tensors of global size: keep these out of the trace.

Patches ShardingPropagator._propagate_tensor_meta_non_cached, checked with torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from vramcast.virtual_gpu.operators.autocast import replaced

_NAME = "_propagate_tensor_meta_non_cached"


@contextmanager
def untraced_shape_propagation() -> Iterator[None]:
    """Run DTensor's shape propagation without dispatch modes."""
    original = getattr(ShardingPropagator, _NAME)

    def propagate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    with replaced(ShardingPropagator, _NAME, propagate):
        yield
