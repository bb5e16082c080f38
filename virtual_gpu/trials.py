"""Trials of cudnn.benchmark: the memory that a device holds while cuDNN tries the algorithms of a convolution.

At the first call of each shape, torch allocates the largest workspace of all plans that fits the free memory, runs the
plans and empties the cache (native/cudnn/Conv_v8.cpp, get_plans_from_find). The largest is that of the Fourier
transform. It lives for a fraction of a second, so a monitor that samples once a second sees it in few runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay import EMPTY_CACHE
from vramcast.virtual_gpu.simulate import replay_on
from vramcast.virtual_gpu.trace import ConvolutionCall, Trace, call_of

_SMALLEST_SIDE, _LARGEST_SIDE = 16, 256
_COMPLEX_BYTES = 8


@dataclass(frozen=True)
class Trial:
    """The first call of a shape."""

    call: ConvolutionCall
    workspace_bytes: int
    used_bytes: int
    """Memory of the device during the trial."""


def transform_bytes(call: ConvolutionCall) -> int:
    """Return the workspace of a convolution by Fourier transform, 0 if cuDNN has no such plan for the call.

    Images are padded to a square whose side is a power of two. Half of the frequencies are stored. The weight is
    transformed and transposed, so it counts twice; input and output count once. With sides of 256, samples follow one
    another.
    """
    if len(call.x) != 4 or prod(call.stride) != 1 or call.is_depthwise:
        return 0
    side = _side(max(size + kernel - 1 for size, kernel in zip(call.x[2:], call.weight[2:], strict=True)))
    if side > _LARGEST_SIDE:
        return 0
    samples = call.x[0] if side < _LARGEST_SIDE else 1
    planes = 2 * prod(call.weight[:2]) + samples * (call.x[1] + call.y[1])
    return _COMPLEX_BYTES * side * (side // 2 + 1) * planes


def _side(size: int) -> int:
    return max(_SMALLEST_SIDE, 1 << (size - 1).bit_length())


def trials_of(trace: Trace, profile: DeviceProfile, options: AllocatorOptions | None = None) -> Iterator[Trial]:
    """Yield the trials of a trace on a device whose workspace fits beside the memory that is in use then."""
    lowered, replayed = replay_on(trace, profile, options or AllocatorOptions(), timeline=True)
    overhead_bytes = profile.overhead_bytes(trace.has_convolutions, trace.has_batch_norm, trace.world_size)
    reserved, allocated = replayed.reserved_timeline or (), replayed.allocated_timeline or ()
    points = [index for index, event in enumerate(lowered.events[: len(reserved)]) if event == EMPTY_CACHE]
    for point, call in zip(points, _tried(trace), strict=False):  # a job that runs out of memory tries no more
        workspace_bytes = transform_bytes(call)
        if workspace_bytes and overhead_bytes + allocated[point] + workspace_bytes <= profile.available_bytes:
            used_bytes = overhead_bytes + reserved[max(point - 1, 0)] + workspace_bytes
            yield Trial(call, workspace_bytes, min(used_bytes, profile.available_bytes))


def _tried(trace: Trace) -> Iterator[ConvolutionCall]:
    """Yield the calls that are tried, in order: each follows an emptied cache."""
    for before, (_, size) in zip(trace.events, trace.events[1:], strict=False):
        index = call_of(size)
        if before == EMPTY_CACHE and index is not None:
            call = trace.calls[index]
            if isinstance(call, ConvolutionCall):
                yield call
