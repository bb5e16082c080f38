"""Workspaces of calls that workspace rules do not describe: in half precision, and with channels last.

Rules are found with 32 bits in NCHW. For other calls, cuDNN 9.10 follows a few principles on all GPUs, because its
kernels for tensor cores read and write NHWC (`python -m benchmarks.study.layouts` asks it):

- In half precision, all tensors in NCHW are copied, and none with channels last.
- With 32 bits and channels last, what a call reads is rounded to TF32 in a copy; what it writes is not copied. From
  compute capability 9.0 on, nothing is copied. Before 8.0, only the input's gradient has copies.
- A depthwise convolution with channels last is cuDNN's, not torch's own. The gradient of a wide kernel's weight pads
  each group to four channels.
"""

import math
from math import prod

from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

HALF_BYTES = 2
_READ_BYTES = 16
"""Kernels read as much at a time: channels are padded to a multiple of it."""
_HALF_STEP = _READ_BYTES // HALF_BYTES
_FEW_INPUTS = 4
"""The first layer of a network, whose forward pass has kernels of its own."""
_WIDE_GROUP = 64
_COPIES_BYTES = 16
"""Added to copies, to the byte."""
_SUMS_BYTES = 5 * MIB
"""The usual partial sums of a weight's gradient (split-K), before compute capability 9.0."""
_WIDE_KERNEL = 7
_PADDED_GROUP = 4
_MOST_PADDED_ON_HOPPER = 256
"""Channels up to which groups are padded with 32 bits."""
_ELEMENTS_OF_PLACE = 16
"""Partial sums of the other kernel for the gradient of a wide depthwise kernel, per position."""
_ANY = (math.inf, math.inf, math.inf)
_HOPPER = 9.0
_TF32 = 8.0


def known_workspace_bytes(
    call: ConvolutionCall, capability: float, padded_channels: int | None, padded_strided_channels: int | None = None
) -> int | None:
    """Return the workspace of a call that rules do not describe, and None for the others.

    Args:
        call: The call.
        capability: The compute capability of the GPU.
        padded_channels: The fewest channels from which a wide depthwise kernel with 32 bits pads its groups.
        padded_strided_channels: The same for one with a stride and as many outputs as inputs, if it differs.

    """
    if call.is_depthwise:
        is_strided = max(call.stride) > 1 and call.x[1] == call.y[1]
        least = padded_strided_channels if is_strided and padded_strided_channels is not None else padded_channels
        return _depthwise_bytes(call, capability, least) if call.channels_last else None
    if call.element_bytes == HALF_BYTES:
        return _half_bytes(call, capability)
    return 0 if call.channels_last and capability >= _HOPPER and _is_aligned(call) else None


def copies_needed(call: ConvolutionCall, capability: float) -> tuple[float, float, float]:
    """Return the most copies of input, output and weight that a call with 32 bits takes."""
    if not call.channels_last:
        return _ANY
    if capability < _TF32:
        return _ANY if call.direction == "data" or not _is_aligned(call) else (0, 0, 0)
    if call.direction == "data" and not _is_aligned(call):
        return 1, 1, 1
    return {"forward": (1, 0, 1), "data": (0, 1, 1), "weight": (1, 1, math.inf)}[call.direction]


def _half_bytes(call: ConvolutionCall, capability: float) -> int:
    outputs, inputs, *kernel = call.weight
    if prod(call.x[2:]) == 1 or (call.direction == "forward" and inputs <= _FEW_INPUTS and call.groups == 1):
        return 0
    groups = call.groups
    x, y = (_padded(channels, groups) for channels in (inputs, outputs // groups))
    is_padded = x != inputs, y != outputs // groups
    elements = sum(
        shape[0] * groups * channels * prod(shape[2:])
        for shape, channels, padded in zip((call.x, call.y), (x, y), is_padded, strict=True)
        if padded or not call.channels_last
    )
    if any(is_padded) or (max(kernel) > 1 and not call.channels_last):  # a pointwise weight is alike in both layouts
        elements += groups * x * y * prod(kernel)
    sums_bytes = _SUMS_BYTES if call.direction == "weight" and capability < _HOPPER else 0
    return elements * HALF_BYTES + (_COPIES_BYTES if elements else 0) + sums_bytes


def _depthwise_bytes(call: ConvolutionCall, capability: float, padded_channels: int | None) -> int:
    if call.direction != "weight" or max(call.weight[2:]) < _WIDE_KERNEL:
        return 0
    channels = call.x[1]
    is_padded = padded_channels is not None and channels >= padded_channels
    if capability >= _HOPPER:
        is_padded = channels <= _MOST_PADDED_ON_HOPPER
    if is_padded or call.element_bytes == HALF_BYTES:
        return _PADDED_GROUP * sum(prod(shape) for shape in call.shapes.values()) * call.element_bytes
    return _ELEMENTS_OF_PLACE * call.x[0] * prod(call.x[2:]) * call.element_bytes


def _is_aligned(call: ConvolutionCall) -> bool:
    """Return whether the channels of each group need no padding."""
    channels = _READ_BYTES // call.element_bytes
    return call.weight[1] % channels == call.weight[0] // call.groups % channels == 0


def _padded(channels: int, groups: int) -> int:
    """Return the channels of a group that a kernel for half precision reads: of narrow groups, a power of two."""
    if groups > 1 and channels < _WIDE_GROUP:
        return 1 << (channels - 1).bit_length()
    return -(-channels // _HALF_STEP) * _HALF_STEP
