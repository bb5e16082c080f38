"""Device profiles: the memory that a GPU and its software use besides the allocator, and cuDNN's workspace rules."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, get_args

from vramcast.errors import UserError, check_amount, check_choice, check_count, check_flag
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.canonical import from_mapping
from vramcast.virtual_gpu.cudnn import library
from vramcast.virtual_gpu.cudnn.layouts import copies_needed, known_workspace_bytes
from vramcast.virtual_gpu.operators.attention import efficient_workspace_bytes
from vramcast.virtual_gpu.operators.embedding import segments_bytes
from vramcast.virtual_gpu.operators.reductions import call_of_sum, split_bytes
from vramcast.virtual_gpu.replay.trials import largest_workspace_bytes
from vramcast.virtual_gpu.tracing.trace import (
    AttentionCall,
    Call,
    ConvolutionCall,
    ReductionCall,
    SegmentsCall,
    SumCall,
)

_TILE = 128
_MOST = 2**40
"""Of any count or amount of a profile: bytes of so many MiB still fit into 64 bits."""
_DIRECTIONS = ("forward", "data", "weight")
_POSITIVE = frozenset(
    {"total_mib", "compute_capability", "multiprocessors", "align_channels", "padded_depthwise_channels",
     "padded_strided_channels", "kernel", "places"}
)  # fmt: skip
"""Fields that cannot be 0."""
_ANY_COPIES = (math.inf,) * 3
_COUNTER_BYTES, _SPLIT_BYTES = 4, 175


@dataclass(frozen=True, kw_only=True)
class ConvolutionWorkspace:
    """A rule for cuDNN's workspace of a convolution, in copies of its tensors.

    With TF32 allowed, cuDNN's tensor-core kernels need NHWC: input, output and weight are copied, channels padded to
    `align_channels`. The first rule that matches a call applies. The size must be exact to the byte: a call that needs
    slightly more than the last one does not fit into its cached block.
    """

    copies: float
    direction: str | None = None
    """'forward', 'data' or 'weight'; None matches all."""
    max_channels: int | None = None
    min_channels: int | None = None
    min_input_channels: int | None = None
    max_input_channels: int | None = None
    max_output_channels: int | None = None
    min_samples: int | None = None
    """Least batch size."""
    max_size: int | None = None
    max_tiles: int | None = None
    """Tiles of the weight gradient. With few, cuDNN splits the sum over positions (split-K), which needs workspace."""
    kernel: int | None = None
    """Kernel size along each dimension."""
    places: int | None = None
    """Matches if the number of output positions of all samples is a multiple of this."""
    aligned: bool | None = None
    """True matches calls whose channels are multiples of the profile's `align_channels`."""
    aligned_outputs: bool | None = None
    """The same for the output channels alone."""
    pointwise: bool | None = None
    """True matches kernels of size 1, which are plain matrix products."""
    grouped: bool | None = None
    """True matches grouped convolutions."""
    depthwise: bool | None = None
    """True matches depthwise convolutions that run in torch's own kernel, without cuDNN."""
    output_copies: float | None = None
    weight_copies: float | None = None
    """Copies of the output and of the weight, if they differ from those of the input."""
    extra_mib: int = 0
    """Workspace in addition to the copies."""
    partial_sums: int = 0
    """Partial sums of the matrix that a call computes (split-K), in whole tiles."""

    @property
    def label(self) -> str:
        """The conditions of the rule."""
        return ", ".join(f"{key} {value}" for key, value in self.conditions.items()) or "all others"

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """The conditions by field."""
        return {name: value for name in CONDITIONS if (value := getattr(self, name)) is not None}

    def matches(self, call: ConvolutionCall, align: int = 1) -> bool:
        """Return True if the rule applies to a call."""
        features = features_of(call, align)
        for name, limit in self.conditions.items():  # faster than all(...), and called for every call and rule
            feature, compare = CONDITIONS[name]
            if not compare(features[feature], limit):
                return False
        return True


CONDITIONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "direction": ("direction", operator.eq),
    "max_channels": ("channels", operator.le),
    "min_channels": ("channels", operator.ge),
    "min_input_channels": ("inputs", operator.ge),
    "max_input_channels": ("inputs", operator.le),
    "max_output_channels": ("outputs", operator.le),
    "min_samples": ("samples", operator.ge),
    "max_size": ("size", operator.le),
    "max_tiles": ("tiles", operator.le),
    "kernel": ("kernel", operator.eq),
    "places": ("places", lambda places, multiple: places % multiple == 0),
    "aligned": ("aligned", operator.eq),
    "aligned_outputs": ("aligned_outputs", operator.eq),
    "pointwise": ("pointwise", operator.eq),
    "grouped": ("grouped", operator.eq),
    "depthwise": ("depthwise", operator.eq),
}
"""The conditions of rules: the feature of a call that each depends on, and how it is compared."""


@lru_cache(maxsize=2**16)  # a trace repeats its calls, and a search asks for them again
def features_of(call: ConvolutionCall, align: int) -> Mapping[str, Any]:
    """Return the features of a call that rules have conditions on."""
    outputs, inputs, *kernel = call.weight
    return {
        "direction": call.direction,
        "channels": max(outputs, inputs),
        "inputs": inputs,
        "outputs": outputs,
        "samples": call.x[0],
        "size": call.x[-1],
        "tiles": _tiles(outputs, prod(call.weight[1:])),
        "kernel": kernel[0] if len(set(kernel)) == 1 else None,
        "places": _places(call.y),
        "aligned": outputs % align == inputs % align == 0,
        "aligned_outputs": outputs % align == 0,
        "pointwise": max(kernel) == 1,
        "grouped": call.groups > 1,
        "depthwise": call.is_depthwise,
    }


def _places(shape: tuple[int, ...]) -> int:
    """Return the number of positions of all samples."""
    return shape[0] * prod(shape[2:])


def _tiles(rows: int, columns: int) -> int:
    """Return the tiles of a matrix; 128 x 128 is the usual tile on an A100."""
    return -(-rows // _TILE) * -(-columns // _TILE)


def partial_sums_bytes(call: ConvolutionCall, count: int) -> int:
    """Return the workspace of partial sums: whole tiles, and a counter for each tile of each sum and of the result.

    cuDNN 9.8 says so of its engines with split-K, to the byte.
    """
    if not count:
        return 0
    outputs, inputs = call.weight[:2]
    rows, columns = {
        "forward": (_places(call.y), outputs),
        "data": (_places(call.x), inputs),
        "weight": (outputs, prod(call.weight[1:])),
    }[call.direction]
    a_tile = count * _TILE**2 * call.element_bytes + _COUNTER_BYTES * (count + 1)
    return _tiles(rows, columns) * a_tile + _SPLIT_BYTES


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A kind of GPU with its driver and libraries. Amounts are in MiB, as nvidia-smi reports them."""

    name: str
    title: str
    total_mib: int
    compute_capability: float
    multiprocessors: int = 108
    """torch splits a reduction into enough blocks to fill them."""
    context_mib: int
    """The CUDA context with the kernels that every training loads."""
    driver_mib: int = 0
    """Reserved by the driver: never free, not counted as used, and not part of the total that CUDA reports."""
    other_mib: int = 0
    """Memory of other processes."""
    cudnn_mib: int = 0
    """Added by loading cuDNN, for networks with convolutions."""
    batch_norm_mib: int = 0
    """Added by cuDNN's batch norm."""
    nccl_mib: int | None = None
    """Memory of NCCL (communicators, buffers, its kernels) outside the allocator; None if it was not measured."""
    nccl_source: str | None = None
    """The measurement that `nccl_mib` comes from."""
    cublas_workspace_bytes: int = 8_519_680  # :4096:2:16:8, aten/src/ATen/cuda/CublasHandlePool.cpp
    cublaslt_workspace_bytes: int = MIB
    align_channels: int = 4
    """TF32 kernels read 16 bytes at a time, which is four channels."""
    convolution: tuple[ConvolutionWorkspace, ...] = field(default=())
    padded_depthwise_channels: int | None = None
    """Channels from which cuDNN pads the groups of a wide depthwise kernel, with 32 bits and channels last."""
    padded_strided_channels: int | None = None
    """The same for a kernel with a stride and as many outputs as inputs; None for the same number."""
    cudnn_release: str | None = None
    """The release of an installed cuDNN that is asked for workspaces, in place of rules."""
    calibrated_on: str | None = None
    """The measurements that the constants were fitted to; None if they come from data sheets and other GPUs."""

    @property
    def without_rules(self) -> "DeviceProfile":
        """The profile without what a rule set gives it."""
        return replace(self, convolution=(), padded_depthwise_channels=None, padded_strided_channels=None)

    @property
    def available_bytes(self) -> int:
        """Memory available to all processes together, which CUDA reports as the device's total (cudaMemGetInfo)."""
        return (self.total_mib - self.driver_mib) * MIB

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for every answer that uses this profile."""
        notes = [] if self.calibrated_on else [f"the device profile {self.name} is not calibrated on measurements"]
        if self.cudnn_release:
            notes.append(f"the workspaces of convolutions are those of cuDNN {self.cudnn_release}")
        return tuple(notes)

    def overhead_bytes(self, convolutions: bool, batch_norm: bool = False, world_size: int = 1) -> int:
        """Return the memory used before the allocator reserves any."""
        cudnn = (self.cudnn_mib if convolutions else 0) + (self.batch_norm_mib if convolutions and batch_norm else 0)
        nccl = (self.nccl_mib or 0) if world_size > 1 else 0
        return (self.context_mib + self.other_mib + cudnn + nccl) * MIB

    def capacity_bytes(self, convolutions: bool, batch_norm: bool = False, world_size: int = 1) -> int:
        """Return the most that the allocator can reserve."""
        return self.available_bytes - self.overhead_bytes(convolutions, batch_norm, world_size)

    def rank_notes(self, world_size: int) -> tuple[str, ...]:
        """Return the notes for an answer about one of several ranks."""
        if world_size == 1 or self.nccl_mib is not None:
            return ()
        return ("the memory of NCCL was not measured and is not part of the figures: leave room for it",)

    def workspace_bytes(self, call: Call) -> int:
        """Return the workspace of a library call on this device."""
        if isinstance(call, ConvolutionCall):
            if self.cudnn_release:
                return library.workspace_bytes(call, self.compute_capability, self.cudnn_release)
            return self._workspace_by_rules(call)
        if isinstance(call, SumCall | ReductionCall):
            reduction = call_of_sum(call) if isinstance(call, SumCall) else call
            return split_bytes(reduction, self.multiprocessors, self.compute_capability) if reduction else 0
        if isinstance(call, SegmentsCall):
            return segments_bytes(call)
        if isinstance(call, AttentionCall):
            return efficient_workspace_bytes(call, self.compute_capability)
        return {"cublas": self.cublas_workspace_bytes, "cublaslt": self.cublaslt_workspace_bytes}[call.library]

    def _workspace_by_rules(self, call: ConvolutionCall) -> int:
        rule = next((item for item in self.convolution if item.matches(call, self.align_channels)), None)
        if rule is None or library.is_unsupported(call, self.compute_capability):
            return 0
        described_bytes = known_workspace_bytes(
            call, self.compute_capability, self.padded_depthwise_channels, self.padded_strided_channels
        )
        if described_bytes is not None:
            return described_bytes
        return workspace_of_rule(call, rule, self.align_channels, copies_needed(call, self.compute_capability))

    def largest_workspace_bytes(self, call: ConvolutionCall) -> int:
        """Return the largest workspace of all execution plans for a call, which cudnn.benchmark allocates."""
        if self.cudnn_release:
            return library.workspace_bytes(call, self.compute_capability, self.cudnn_release, largest=True)
        return largest_workspace_bytes(call)


def workspace_of_rule(
    call: ConvolutionCall, rule: ConvolutionWorkspace, align: int, most_copies: Sequence[float] = _ANY_COPIES
) -> int:
    """Return the workspace of a call that a rule matches, with limited copies of input, output and weight."""
    amounts = (_padded(call.x, align, (1,)), _padded(call.y, align, (1,)), _padded(call.weight, align, (0, 1)))
    chosen = (rule.copies, rule.output_copies, rule.weight_copies)
    copies = (rule.copies if item is None else item for item in chosen)
    limited = (min(count, most) for count, most in zip(copies, most_copies, strict=True))
    elements = sum(count * amount for count, amount in zip(limited, amounts, strict=True))
    return int(elements * call.element_bytes) + rule.extra_mib * MIB + partial_sums_bytes(call, rule.partial_sums)


def _padded(shape: tuple[int, ...], align: int, dimensions: tuple[int, ...]) -> int:
    elements = 1
    for index, size in enumerate(shape):
        elements *= -(-size // align) * align if index in dimensions else size
    return elements


def parse_profile(settings: Mapping[str, Any]) -> DeviceProfile:
    """Return the profile that settings describe."""
    rules = settings.get("convolution") or ()
    if not isinstance(rules, list | tuple):
        raise UserError(f"expected the profile's convolution rules as a list, found {rules!r}: change the profile")
    parsed = tuple(from_mapping(ConvolutionWorkspace, rule, "a convolution rule") for rule in rules)
    for rule in parsed:
        _check_fields(rule, "a convolution rule")
        if rule.direction is not None:
            check_choice("the direction of a convolution rule", rule.direction, _DIRECTIONS)
    what = f"the device profile {settings.get('name')}"
    if parsed and settings.get("cudnn_release"):
        raise UserError(f"expected cudnn_release or rules in {what}, found both: remove one")
    profile = from_mapping(DeviceProfile, {**settings, "convolution": parsed}, what)
    _check_fields(profile, what)
    if profile.capacity_bytes(convolutions=True, batch_norm=True) < 0:
        raise UserError(
            f"expected the context, the libraries and the driver of {what} to fit into total_mib, found "
            f"{profile.total_mib} MiB: change the profile"
        )
    return profile


def _check_fields(record: ConvolutionWorkspace | DeviceProfile, what: str) -> None:
    """Raise UserError for a field of another type, or for a number that no memory or count can be."""
    for item in fields(record):
        value, kinds = getattr(record, item.name), get_args(item.type) or (item.type,)
        name = f"{item.name} of {what}"
        if (value is None and type(None) in kinds) or item.name == "convolution":
            continue
        if bool in kinds:
            check_flag(name, value)
        elif str in kinds:
            if not isinstance(value, str):
                raise UserError(f"expected {name} to be a text, found {value!r}: change it")
        elif float in kinds:
            check_amount(name, value, zero=item.name not in _POSITIVE)
        else:
            check_count(name, value, least=1 if item.name in _POSITIVE else 0)
            if value > _MOST:
                raise UserError(f"expected {name} to be at most {_MOST}, found {value}: change it")
