"""Kernels that allocate an output and resize it: a storage grows with its tensor, but it never shrinks.

The mean of a loss keeps a storage as large as the network's output, and the gradient of `unfold` one as large as the
columns. Meta functions allocate the final size. torch on the CPU has the same code, with which tests compare.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.contiguity import contiguous
from vramcast.virtual_gpu.shapes import broadcast_shape
from vramcast.virtual_gpu.trace import Kernel, Tracer

aten = torch.ops.aten

_REDUCTION_NONE = 0


def _resized(tracer: Tracer, whole: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of a shape in the storage of another tensor, or in a new one if that is too small."""
    if prod(shape) > whole.numel():
        return tracer.see(torch.empty(shape, dtype=whole.dtype, device="meta"))
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=whole.dtype, device="meta").set_(whole.untyped_storage(), 0, shape, strides)


def _loss(buffers: int, position: int) -> Kernel:
    """Return the kernel of a loss: the buffers for its elements, and the position of the argument `reduction`."""

    def run(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate the elements of the loss, and store their mean or sum in their place."""
        x, target = args[:2]
        reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
        if not x.is_meta or x.dtype != target.dtype or reduction == _REDUCTION_NONE:
            return NotImplemented
        shape = broadcast_shape(x.shape, target.shape)
        elements = [tracer.see(torch.empty(shape, dtype=x.dtype, device="meta")) for _ in range(buffers)]
        return _resized(tracer, elements[0], ())

    return run


def _im2col(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the columns beside an output of the input's size (cuda/Im2Col.cu)."""
    x, kernel, dilation, padding, stride = args
    if not x.is_meta or x.dim() != 4:
        return NotImplemented
    places = (
        (size + 2 * pad - step * (length - 1) - 1) // move + 1
        for size, pad, step, length, move in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    first = tracer.see(torch.empty(x.shape, dtype=x.dtype, device="meta"))
    copy = contiguous(tracer, x)
    out = _resized(tracer, first, (x.shape[0], x.shape[1] * prod(kernel), prod(places)))
    del first, copy
    return out


def _col2im(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an image in a storage of the columns' size (cuda/Col2Im.cu)."""
    columns, size, kernel = args[:3]
    if not columns.is_meta or columns.dim() != 3:
        return NotImplemented
    whole = tracer.see(torch.empty(columns.shape, dtype=columns.dtype, device="meta"))
    copy = contiguous(tracer, columns)
    out = _resized(tracer, whole, (columns.shape[0], columns.shape[1] // prod(kernel), *size))
    del copy
    return out


def resizing_kernels() -> dict[Any, Kernel]:
    """Return the kernels that resize their output, by operator."""
    return {
        aten.mse_loss.default: _loss(buffers=2, position=2),  # native/BinaryOps.cpp: one beside the output
        aten.smooth_l1_loss.default: _loss(buffers=2, position=2),
        aten.binary_cross_entropy.default: _loss(buffers=1, position=3),  # cuda/Loss.cu
        aten.soft_margin_loss.default: _loss(buffers=1, position=2),  # native/Loss.cpp
        aten.im2col.default: _im2col,
        aten.col2im.default: _col2im,
    }
