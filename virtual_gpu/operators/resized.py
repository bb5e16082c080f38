"""Kernels that allocate an output and resize it: a storage grows with its tensor, but it never shrinks.

The mean of a loss keeps a storage as large as the network's output, and the gradient of `unfold` one as large as the
columns. Meta functions allocate the final size. torch on the CPU has the same code, with which tests compare.
"""

from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.contiguity import contiguous
from vramcast.virtual_gpu.operators.shapes import broadcast_shape
from vramcast.virtual_gpu.tracing.trace import Kernel, Tracer

aten = torch.ops.aten

_REDUCTION_NONE = 0


def _resized(tracer: Tracer, whole: Tensor, final: Tensor) -> Tensor:
    """Return a result in the storage of another tensor, or in a new one if that is too small."""
    if final.numel() > whole.numel():
        return tracer.see(final)
    return final.set_(whole.untyped_storage(), 0, final.shape, final.stride())


def _loss(operator: Any, buffers: int, position: int) -> Kernel:
    """Return the kernel of a loss: the buffers for its elements, and the position of the argument `reduction`."""

    def run(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate the elements of the loss, and store their mean or sum in their place."""
        x, target = args[:2]
        reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
        if not x.is_meta or reduction == _REDUCTION_NONE:
            return NotImplemented
        final = operator(*args, **kwargs)  # torch's own checks and dtype
        shape = broadcast_shape(x.shape, target.shape)
        elements = [tracer.see(torch.empty(shape, dtype=final.dtype, device="meta")) for _ in range(buffers)]
        return _resized(tracer, elements[0], final)

    return run


def _columns(operator: Any) -> Kernel:
    """Return the kernel of `unfold` or `fold`."""

    def run(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate an output of the input's size, and resize it (cuda/Im2Col.cu, cuda/Col2Im.cu)."""
        x = args[0]
        if not x.is_meta:
            return NotImplemented
        final = operator(*args, **kwargs)
        first = tracer.see(torch.empty(x.shape, dtype=x.dtype, device="meta"))
        copy = contiguous(tracer, x)
        out = _resized(tracer, first, final)
        del first, copy
        return out

    return run


def resizing_kernels() -> dict[Any, Kernel]:
    """Return the kernels that resize their output, by operator."""
    losses = {
        aten.mse_loss.default: (2, 2),  # native/BinaryOps.cpp: one buffer beside the output
        aten.smooth_l1_loss.default: (2, 2),
        aten.binary_cross_entropy.default: (1, 3),  # cuda/Loss.cu
        aten.soft_margin_loss.default: (1, 2),  # native/Loss.cpp
    }
    kernels = {operator: _loss(operator, *numbers) for operator, numbers in losses.items()}
    columns = {operator: _columns(operator) for operator in (aten.im2col.default, aten.col2im.default)}
    return {**kernels, **columns}
