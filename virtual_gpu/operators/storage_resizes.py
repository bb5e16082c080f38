"""Resizes of storages, which the dispatcher does not show: `storage.resize_(0)` is how FSDP frees its parameters.

Patches torch.UntypedStorage.resize_, checked with torch 2.6 and 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramcast.virtual_gpu.operators.autocast import replaced
from vramcast.virtual_gpu.tracing.trace import Tracer


@contextmanager
def traced_resizes(tracer: Tracer) -> Iterator[None]:
    """Trace a resize of a storage on the meta device as a free and an allocation."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        before_bytes = storage.nbytes()
        resized = original(storage, size_bytes)
        if storage.nbytes() != before_bytes and storage.device.type == "meta":
            tracer.resized(storage)
        return resized

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield
