"""Collectives of Python objects: a rank without others keeps its own objects.

Patches broadcast_object_list, all_gather_object, gather_object and scatter_object_list of torch.distributed, checked
with torch 2.13. What another rank would send is not known: a rank that waits for it gets what it had, often None.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from vramcast.virtual_gpu.operators.autocast import replaced


def _broadcast(object_list: list[Any], *_: Any, **__: Any) -> None:
    """Leave the objects as they are."""


def _all_gather(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    """Let all ranks have sent the object of this one."""
    object_list[:] = [obj] * len(object_list)


def _gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    """Let all ranks have sent the object of this one, if this one collects them."""
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    """Take the object of this rank, if this one distributes them."""
    objects = scatter_object_input_list
    scatter_object_output_list[0] = objects[dist.get_rank(group)] if objects else None


_FUNCTIONS = {
    "broadcast_object_list": _broadcast,
    "all_gather_object": _all_gather,
    "gather_object": _gather,
    "scatter_object_list": _scatter,
}


@contextmanager
def own_objects() -> Iterator[None]:
    """Let collectives of objects return without communication."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    with ExitStack() as stack:
        for name, function in _FUNCTIONS.items():
            for owner in (dist, c10d):
                stack.enter_context(replaced(owner, name, function))
        yield
