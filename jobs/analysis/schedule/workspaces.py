"""The calls of a table's convolutions, whose workspaces the rules of a device tell."""

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from vramcast.jobs.analysis.schedule.parameters import Shape
from vramcast.jobs.analysis.schedule.storages import LayerNode, Storages
from vramcast.jobs.spec import NETWORK_INPUT
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.trials import largest_workspace_bytes
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall
from vramcast.virtual_gpu.training.setup import TrainingSetup

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_REMEMBERED = 65536
_LEAST_DIMENSIONS = 3
"""Of the weight of a convolution: outputs, inputs and a kernel. Tables may list a number of parameters alone."""


@dataclass(frozen=True)
class Call:
    """One direction of a convolution, for any batch."""

    direction: str
    x: Shape
    weight: Shape
    y: Shape
    stride: Shape
    groups: int
    dtype: str
    channels_last: bool

    def for_batch(self, batch: int) -> ConvolutionCall:
        """Return the call; its padding follows from the shapes, for a kernel without dilation."""
        sides = zip(self.x[1:], self.y[1:], self.stride, self.weight[2:], strict=True)
        missing = ((after - 1) * step + kernel - before for before, after, step, kernel in sides)
        padding = tuple(max(-(-pixels // 2), 0) for pixels in missing)
        return ConvolutionCall(
            self.direction, (batch, *self.x), self.weight, (batch, *self.y), self.stride, self.groups, padding,
            (1,) * len(self.stride), self.dtype, self.channels_last,
        )  # fmt: skip


def calls_of(storages: Storages, node: LayerNode, training: TrainingSetup) -> dict[str, Call]:
    """Return the calls of a convolution by direction: none if the table does not tell their shapes."""
    weight, out = node.parameters[0], node.record.output_shape
    if len(weight) < _LEAST_DIMENSIONS:
        return {}
    x = _input_shape(storages, node, weight)
    if x is None or len(out) != len(weight) - 1:
        return {}
    transposed = "transpose" in node.kind
    before, after = (out, x) if transposed else (x, out)
    stride = node.record.stride or tuple(max(round(a / b), 1) for a, b in zip(before[1:], after[1:], strict=True))
    stride = stride if len(stride) == len(out) - 1 else stride[:1] * (len(out) - 1)
    groups = node.record.groups or max(before[0] // weight[1], 1)
    dtype = _DTYPES[training.autocast or training.dtype]
    names = ("data", "forward", "weight") if transposed else ("forward", "data", "weight")
    return {
        use: Call(name, before, weight, after, stride, groups, dtype, training.channels_last)
        for use, name in zip(("forward", "data", "weight"), names, strict=True)
    }


def _input_shape(storages: Storages, node: LayerNode, weight: Shape) -> Shape | None:
    """Return the shape of a convolution's input; that of the network is taken as square."""
    places = [read for read in node.reads if read != NETWORK_INPUT]
    if places:
        shape = storages.nodes[places[0]].record.output_shape
        return shape if len(shape) == len(weight) - 1 else None
    channels = weight[1] * (node.record.groups or 1)
    side = isqrt(storages.input_elements // channels)
    square = len(weight) == 4 and side * side * channels == storages.input_elements
    return (channels, side, side) if square else None


class _ByName:
    """A profile that hashes fast."""

    __slots__ = ("profile",)

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return hash(self.profile.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByName) and (self.profile is other.profile or self.profile == other.profile)


def workspace_bytes(profile: DeviceProfile, call: Call, batch: int) -> int:
    """Return the workspace of a call on a device."""
    return _workspace_bytes(_ByName(profile), call, batch)


@lru_cache(maxsize=_REMEMBERED)
def _workspace_bytes(device: _ByName, call: Call, batch: int) -> int:
    return device.profile.workspace_bytes(call.for_batch(batch))


@lru_cache(maxsize=_REMEMBERED)
def trial_bytes(call: Call, batch: int) -> int:
    """Return the largest workspace that cudnn.benchmark tries for a call."""
    return largest_workspace_bytes(call.for_batch(batch))
