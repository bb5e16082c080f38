"""TorchScript and NVTX: scripted functions find torch's functions, and ranges of a profiler have no effect.

Checked on torch 2.13.
"""

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.tracing.source_lines import is_ours

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Let TorchScript compile torch's own functions in the place of our wrappers, and NVTX do nothing."""
    builtins, recursive = torch.jit._builtins, torch.jit._recursive
    builtins._get_builtin_table()  # type: ignore[no-untyped-call]  # cached: it must know the functions of torch
    for owner, name in ((builtins, "_find_builtin"), (recursive, "try_compile_fn")):
        patches.set(owner, name, _of_torch(getattr(owner, name)))
    patches.set(torch.cuda.nvtx, "_nvtx", _Ranges())
    profiler: Any = torch.autograd.profiler.emit_nvtx
    patches.set(profiler, "__enter__", lambda self: self)
    patches.set(profiler, "__exit__", lambda self, *error: False)


def _of_torch(original: Any) -> Any:
    """Pass the function that a wrapper of ours stands for: TorchScript reads its source, or knows it by identity."""

    @functools.wraps(original)
    def called(function: Any, *args: Any) -> Any:
        code = getattr(function, "__code__", None)
        if code is not None and hasattr(function, "__wrapped__") and is_ours(code.co_filename):
            function = function.__wrapped__
        return original(function, *args)

    return called


class _Ranges:
    """Stands for torch._C._nvtx: counts the depth of ranges, which NVTX returns, and does nothing else."""

    def __init__(self) -> None:
        self._depth = 0
        self._handles = itertools.count(1)

    def rangePushA(self, message: str) -> int:  # noqa: N802
        """Open a range and return its depth, from 0."""
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802
        """Close the last range and return its depth; NVTX returns a negative number where none is open."""
        self._depth = max(self._depth - 1, -1)
        depth = self._depth
        self._depth = max(depth, 0)
        return depth

    def rangeStartA(self, message: str) -> int:  # noqa: N802
        """Return the handle of a range that another thread may end."""
        return next(self._handles)

    def rangeEnd(self, handle: int) -> None:  # noqa: N802
        """End a range."""

    def markA(self, message: str) -> None:  # noqa: N802
        """Mark an instant."""

    def deviceRangeStart(self, message: str, stream: int) -> object:  # noqa: N802
        """Return the handle of a range on a stream."""
        return object()

    def deviceRangeEnd(self, handle: object, stream: int) -> None:  # noqa: N802
        """End a range on a stream."""
