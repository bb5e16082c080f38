"""Copies that CUDA's kernels make of tensors that are not contiguous, for the duration of a call.

Kernels that index memory directly call `contiguous()` or `expect_contiguous()` first. Meta functions do not show it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.shapes import SHAPES
from vramcast.virtual_gpu.tracing.trace import Kernel, Tracer

aten = torch.ops.aten

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_COPIED_FIRST = {
    aten.native_layer_norm.default: (0,),  # cuda/layer_norm_kernel.cu, layer_norm_cuda
    aten.native_layer_norm_backward.default: (0, 1),  # layer_norm_backward_cuda
}
"""Operators whose kernels need contiguous arguments, with the positions of those."""
_COPIED_LAST = {
    aten._softmax.default: (0,),  # cuda/SoftMax.cu, host_softmax
    aten._log_softmax.default: (0,),
    aten._log_softmax_backward_data.default: (0, 1),  # host_softmax_backward
}
"""The same for structured kernels, which allocate their outputs before anything else."""


def suggested_layout(x: Tensor) -> torch.memory_format:
    """Return the memory format that a tensor's strides suggest (c10/core/MemoryFormat.h, is_channels_last_strides)."""
    if x.dim() not in _CHANNELS_LAST or not _channels_come_first(x.shape, x.stride()):
        return torch.contiguous_format
    return _CHANNELS_LAST[x.dim()]


def _channels_come_first(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides grow from the channels over the places, the last first, to the samples."""
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < max(least, dim == 1) or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True


def contiguous(tracer: Tracer, x: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return a tensor, or a copy in this layout that is allocated now and lives as long as it is referenced."""
    if x.layout is not torch.strided or x.is_contiguous(memory_format=layout):
        return x
    return tracer.see(torch.empty(x.shape, dtype=x.dtype, device="meta", memory_format=layout))


def _copying(operator: Any, positions: tuple[int, ...], *, first: bool) -> Kernel:
    shape = SHAPES[operator]

    def run(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate the outputs, and before or after them copies of arguments that are not contiguous."""
        scattered = [args[position] for position in positions if not args[position].is_contiguous()]
        if not args[0].is_meta or not scattered:
            return NotImplemented
        if first:
            copies = [contiguous(tracer, item) for item in scattered]
            out = tracer.see_all(shape(*args, **kwargs))
        else:
            out = tracer.see_all(shape(*args, **kwargs))
            copies = [contiguous(tracer, item) for item in scattered]
        copies.clear()
        return out

    return run


def _batch_norm_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the gradient to the layout of the input if it has another (cudnn/BatchNorm.cpp)."""
    grad, x = args[:2]
    layout, trains = suggested_layout(x), args[7]
    if not x.is_meta or not trains or x.dim() < 3 or grad.is_contiguous(memory_format=layout):
        return NotImplemented
    copy = contiguous(tracer, grad, layout)
    return tracer.see_all(SHAPES[aten.native_batch_norm_backward.default](copy, *args[1:], **kwargs))


def copying_kernels() -> dict[Any, Kernel]:
    """Return the kernels that copy arguments and allocate nothing else but their outputs."""
    return {
        **{operator: _copying(operator, positions, first=True) for operator, positions in _COPIED_FIRST.items()},
        **{operator: _copying(operator, positions, first=False) for operator, positions in _COPIED_LAST.items()},
        aten.native_batch_norm_backward.default: _batch_norm_backward,
    }
