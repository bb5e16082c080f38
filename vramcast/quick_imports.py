"""Imports of large libraries without garbage collection, which would search all that they make again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspend garbage collection, and exempt from it what was imported. Only for processes of vramcast's own."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
