"""Convolutions as cuDNN runs them: outputs, workspaces, copies to one layout, and the gradient of the bias.

aten/src/ATen/native/cudnn/ConvShared.cpp and native/Convolution.cpp, convolution_backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.contiguity import contiguous, suggested_layout
from vramcast.virtual_gpu.operators.reductions import record_sum_buffer
from vramcast.virtual_gpu.operators.shapes import convolution_shape
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, Kernel, Tracer

aten = torch.ops.aten


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout that a call runs in: channels last if either tensor is (cudnn_conv_suggest_memory_format)."""
    if x.dtype == torch.float64:
        return torch.contiguous_format
    layouts = (suggested_layout(item) for item in (x, weight))
    return next((item for item in layouts if item != torch.contiguous_format), torch.contiguous_format)


def _convolution(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the output, then copies and cuDNN's workspace for the duration of the call.

    A transposed convolution runs as the gradient of a convolution's input.
    """
    x, weight, _, stride, padding, dilation, transposed, _, groups = args
    if not x.is_meta or weight.shape[0 if transposed else 1] * (1 if transposed else groups) != x.shape[1]:
        return NotImplemented
    if transposed:
        shape: Sequence[int] = aten.convolution.default(*args).shape
    else:
        shape = convolution_shape(x, weight, _spread(stride, x), _spread(padding, x), _spread(dilation, x))
    layout = _layout(x, weight)
    y = tracer.see(torch.empty(shape, dtype=x.dtype, device="meta", memory_format=layout))
    copies = [contiguous(tracer, item, layout) for item in (x, weight)]
    direction, sides = ("data", (y, x)) if transposed else ("forward", (x, y))
    tracer.workspace(_call(direction, (sides[0], weight, sides[1]), (stride, padding, dilation), groups, layout))
    copies.clear()
    return y


def _convolution_backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the gradients of input and weight, each with its workspace, then of the bias.

    Tensors in another layout than the call's are copied first. The bias's gradient is a sum over the rows of the
    gradient as it came.
    """
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, _, groups, mask = args
    if not x.is_meta:
        return NotImplemented
    directions = ("forward" if transposed else "data", "weight")
    sides = (grad, x) if transposed else (x, grad)
    layout = _layout(x, weight)
    copies = [contiguous(tracer, item, layout) for item in ((x, grad) if mask[1] else (grad,))]
    made: list[Tensor | None] = [None, None, None]
    for index, like in enumerate((x, weight)):
        if mask[index]:
            made[index] = tracer.see(torch.empty(like.shape, dtype=like.dtype, device="meta", memory_format=layout))
            copy = contiguous(tracer, weight, layout) if index == 0 else None
            tensors, window = (sides[0], weight, sides[1]), (stride, padding, dilation)
            tracer.workspace(_call(directions[index], tensors, window, groups, layout))
            del copy
    copies.clear()
    if mask[2]:
        made[2] = tracer.see(torch.empty(bias_sizes, dtype=x.dtype, device="meta"))
        record_sum_buffer(tracer, grad, [0, *range(2, grad.dim())])
    return tuple(made)


def _spread(values: Sequence[int], x: Tensor) -> Sequence[int]:
    """Repeat a single value for all spatial dimensions."""
    return values if len(values) == x.dim() - 2 else list(values) * (x.dim() - 2)


def _call(
    direction: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    window: tuple[Sequence[int], Sequence[int], Sequence[int]],
    groups: int,
    layout: torch.memory_format,
) -> ConvolutionCall:
    """Return the call for input, weight and output, and for stride, padding and dilation."""
    x, weight, y = (tuple(item.shape) for item in tensors)
    stride, padding, dilation = (tuple(_spread(values, tensors[0])) for values in window)
    return ConvolutionCall(
        direction, x, weight, y, stride, groups, padding, dilation,
        dtype=str(tensors[0].dtype).removeprefix("torch."), channels_last=layout != torch.contiguous_format,
    )  # fmt: skip


def convolution_kernels() -> dict[Any, Kernel]:
    """Return the kernels of convolutions."""
    return {aten.convolution.default: _convolution, aten.convolution_backward.default: _convolution_backward}
