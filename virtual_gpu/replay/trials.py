"""Trials of cudnn.benchmark: the memory that a job reserves while cuDNN tries the algorithms of a convolution.

At the first call of each shape, torch allocates the largest workspace of all plans that fits the free memory, runs the
plans and empties the cache (native/cudnn/Conv_v8.cpp, get_plans_from_find). In cuDNN 9.1, the largest is that of the
Fourier transform, which tensors in channels last do not have. It lives for a fraction of a second, so a monitor that
samples once a second sees it in few runs.

Evidence: timm's table on an A100. The form was fixed on the even half of the networks, as the last of about six
(tiles of 32 x 32, one or two copies of the weight, with and without the batch): mobilevitv2_100 holds 16,609 MiB
above its live memory with batches of 8, 16 and 64, which is 128 x 256 channels at a side of 256. Of 31 rows that do
not grow with the batch, 14 are within 1.5 % of the largest trial of their network; of the 20 in the odd half, 18 are
below their largest trial. `python -m benchmarks.study.trials --data FILE` counts rows by their trials: 38 of the 39
rows that are more than 10 % above the estimate are within 2 % of their largest trial or below it, and none of the 357
rows without a trial above the estimate is among them. Whether a monitor sees a trial is chance, so trials are no part
of an estimate: no threshold that added them reduced the error of both halves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE, Replay
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall, Trace, call_of

_SMALLEST_SIDE, _LARGEST_SIDE = 16, 256
_COMPLEX_BYTES = 8
_COPIES, _DEPTHWISE_COPIES = 2, 4
"""Copies of all tensors in the largest workspace of a call in channels last. Of calls whose channels are powers of two,
cuDNN 9.8 and 9.10 list 1.0 to 2.4 in the median of each direction and precision, and four for depthwise ones."""


@dataclass(frozen=True)
class Trial:
    """The first call of a shape."""

    call: ConvolutionCall
    workspace_bytes: int
    reserved_bytes: int
    """Reserved memory during the trial."""


def largest_workspace_bytes(call: ConvolutionCall) -> int:
    """Return the largest workspace of all plans for a call: exact for NCHW, a usual value for channels last."""
    if not call.channels_last:
        return transform_bytes(call)
    copies = _DEPTHWISE_COPIES if call.is_depthwise else _COPIES
    return copies * call.element_bytes * sum(map(prod, (call.x, call.y, call.weight)))


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


def trials_of(
    trace: Trace,
    replayed: Replay,
    capacity_bytes: int,
    largest_bytes: Callable[[ConvolutionCall], int] = largest_workspace_bytes,
) -> Iterator[Trial]:
    """Yield the trials of a replayed trace whose workspace fits beside the memory that is in use then."""
    if not replayed.before_emptying:
        return
    for call, (allocated, reserved) in zip(_tried(trace), replayed.before_emptying, strict=False):
        workspace_bytes = largest_bytes(call) if call else 0
        if call and workspace_bytes and allocated + workspace_bytes <= capacity_bytes:
            yield Trial(call, workspace_bytes, min(reserved + workspace_bytes, capacity_bytes))


def _tried(trace: Trace) -> Iterator[ConvolutionCall | None]:
    """Yield the call that follows each time the cache is emptied; None if a script emptied it between two calls."""
    for event, (block, size) in pairwise([*trace.events, EMPTY_CACHE]):
        if event == EMPTY_CACHE:
            index = call_of(size) if block >= 0 else None
            call = None if index is None else trace.calls[index]
            yield call if isinstance(call, ConvolutionCall) else None
