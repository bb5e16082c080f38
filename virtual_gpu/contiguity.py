"""Copies that CUDA's kernels make of tensors that are not contiguous, for the duration of a call.

Kernels that index memory directly call `contiguous()` or `expect_contiguous()` first. Meta functions do not show it.
"""

from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.shapes import SHAPES
from vramcast.virtual_gpu.trace import Kernel, Tracer

aten = torch.ops.aten

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
    """Return the memory format that a tensor suggests (c10/core/TensorImpl.h, suggest_memory_format)."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def contiguous(tracer: Tracer, x: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return a tensor, or a copy in this layout that is allocated now and lives as long as it is referenced."""
    if x.is_contiguous(memory_format=layout):
        return x
    return tracer.see(torch.empty(x.shape, dtype=x.dtype, device="meta", memory_format=layout))


def _copying(operator: Any, positions: tuple[int, ...], *, first: bool) -> Kernel:
    shape = SHAPES[operator]

    def run(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate the outputs, and copies of arguments that are not contiguous."""
        uneven = [args[position] for position in positions if not args[position].is_contiguous()]
        if not args[0].is_meta or not uneven:
            return NotImplemented
        copies = [contiguous(tracer, item) for item in uneven] if first else []
        out = _seen(tracer, shape(*args, **kwargs))
        copies += [contiguous(tracer, item) for item in uneven] if not first else []
        copies.clear()
        return out

    return run


def _seen(tracer: Tracer, out: Any) -> Any:
    """Record the allocation of outputs."""
    for item in out if isinstance(out, tuple) else (out,):
        if isinstance(item, Tensor):
            tracer.see(item)
    return out


def _batch_norm_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the gradient to the layout of the input if it has another (cudnn/BatchNorm.cpp)."""
    grad, x = args[:2]
    layout = suggested_layout(x)
    if not x.is_meta or x.dim() < 3 or grad.is_contiguous(memory_format=layout):
        return NotImplemented
    copy = contiguous(tracer, grad, layout)
    return _seen(tracer, SHAPES[aten.native_batch_norm_backward.default](copy, *args[1:], **kwargs))


def copying_kernels() -> dict[Any, Kernel]:
    """Return the kernels that copy arguments and allocate nothing else than their outputs."""
    return {
        **{operator: _copying(operator, positions, first=True) for operator, positions in _COPIED_FIRST.items()},
        **{operator: _copying(operator, positions, first=False) for operator, positions in _COPIED_LAST.items()},
        aten.native_batch_norm_backward.default: _batch_norm_backward,
    }
