"""A whole run from its passes: parameters, a dry run and the first steps, replayed through the caching allocator.

Blocks of the small pool are counted, not placed: their segments are small, and they are most of the events.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from vramcast.jobs.analysis.schedule.optimizer import state_blocks, temporary_blocks
from vramcast.jobs.analysis.schedule.placed import PlacedPart, PlacedPass, placed, total_bytes
from vramcast.jobs.analysis.schedule.step import Pass, PassWriter
from vramcast.jobs.analysis.schedule.storages import storages_of
from vramcast.jobs.analysis.schedule.workspaces import Call, trial_bytes
from vramcast.jobs.spec import LayerTable
from vramcast.virtual_gpu.allocator.allocator import Block, CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import SMALL_SEGMENT_BYTES, SMALL_SIZE_BYTES, round_up
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES, TrainingSetup


@dataclass(frozen=True)
class ScheduledPeak:
    """The memory that a schedule takes, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    trial_bytes: int
    """Reserved while cudnn.benchmark tries the largest workspace; the reserved bytes without it."""
    state_bytes: int
    """Parameters, gradients and optimizer state."""
    kept_bytes: int
    """Activations after a forward pass."""
    small_bytes: int
    """Of blocks in the small pool, at their peak."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of a job on a device, which is computed when its peak is first read."""

    table: LayerTable
    training: TrainingSetup
    profile: DeviceProfile

    @cached_property
    def peak(self) -> ScheduledPeak:
        """The memory that the schedule takes."""
        return scheduled_peak(self.table, self.training, self.profile)


def scheduled_peak(table: LayerTable, training: TrainingSetup, profile: DeviceProfile) -> ScheduledPeak:
    """Return the memory of a training run by its layer table, on a device without a memory limit."""
    return _Run(table, training, profile).peak()


def _passes(table: LayerTable, training: TrainingSetup) -> Pass:
    """Return the passes of a network, which all batch sizes, optimizers and devices share."""
    return _written(_Same(table), *(getattr(training, name) for name in _OF_PASSES))


_OF_PASSES = ("dtype", "autocast", "checkpointing", "loss", "channels_last")
"""The options that decide a pass for any batch."""


class _Same:
    """A table that is equal to itself alone: hashing its layers would take as long as a pass."""

    __slots__ = ("table",)

    def __init__(self, table: LayerTable) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.table is other.table


@lru_cache(maxsize=64)
def _written(same: _Same, *options: Any) -> Pass:
    training = TrainingSetup(batch_size=1, **dict(zip(_OF_PASSES, options, strict=True)))
    return PassWriter(storages_of(same.table, training), training).write()


class _Run:
    """Composes the steps of a run on an allocator."""

    def __init__(self, table: LayerTable, training: TrainingSetup, profile: DeviceProfile) -> None:
        self.training, self.profile = training, profile
        self.element_bytes = DTYPE_BYTES[training.dtype]
        self.parameters = [prod(shape) * self.element_bytes for shape in table.trainable_shapes]
        self.frozen = max(table.parameters * self.element_bytes - sum(self.parameters), 0)
        self.state = state_blocks(training, table.trainable_shapes)
        self.temporaries = temporary_blocks(training, table.trainable_shapes)
        self.input_bytes = table.input_elements * self.element_bytes
        self.passes = _passes(table, training)
        outside = training.autocast and training.dry_run_batch_size  # a dry run is outside of autocast
        self.plain_passes = _passes(table, replace(training, autocast=None)) if outside else self.passes
        self.linear = any("linear" in kind.lower() for kind in {layer.kind for layer in table.layers})
        self.allocator = CachingAllocator()
        self.live: dict[int, Block] = {}
        self.input: Block | None = None
        self.output: Block | None = None
        self.output_bytes = 0
        self.gradients: list[Block] = []
        self.small = self.small_peak = self.small_gradients = 0
        self.tried: set[Call] = set()
        self.trial_bytes = 0

    def peak(self) -> ScheduledPeak:
        """Run the steps."""
        training, steady, last = self.training, self.training.batch_size, self.training.last_batch_size
        self._hold([*self.parameters, self.frozen])
        if training.dry_run_batch_size:
            self._dry_run(training.dry_run_batch_size)
        self._hold([self.profile.cublas_workspace_bytes] * 2)
        by_size = {size: placed(self.passes, size, self.profile) for size in {steady, last or steady}}
        for index, size in enumerate([steady, steady, *([last, steady, steady] if last else [])]):
            for batch in range(min(training.accumulate, 2)):
                self._batch(by_size[size], size, first=batch == 0)
            if index == 0:
                self._hold(self.state)
            self._optimizer_step(*self.temporaries)
            if training.zero_grad == "after_step":
                self._drop_gradients()
        reserved = self.allocator.peak_reserved_bytes + round_up(self.small_peak, SMALL_SEGMENT_BYTES)
        return ScheduledPeak(
            self.allocator.peak_allocated_bytes + self.small_peak, reserved, max(self.trial_bytes, reserved),
            2 * sum(self.parameters) + self.frozen + sum(self.state), by_size[steady].kept_bytes, self.small_peak,
        )  # fmt: skip

    def _hold(self, sizes: Sequence[int]) -> None:
        """Allocate blocks that are never freed."""
        for size in sizes:
            if size > SMALL_SIZE_BYTES:
                self.allocator.malloc(size)
        self._count_small(total_bytes([size for size in sizes if size <= SMALL_SIZE_BYTES]))

    def _count_small(self, net_bytes: int, peak_bytes: int = 0) -> None:
        self.small_peak = max(self.small_peak, self.small + max(net_bytes, peak_bytes))
        self.small += net_bytes

    def _dry_run(self, size: int) -> None:
        passed = placed(self.plain_passes, size, self.profile)
        batch = self.allocator.malloc(size * self.input_bytes)
        self._play(passed.forward)
        self.small -= passed.forward.small_net
        for block in self.live.values():
            self.allocator.free(block)
        self.live.clear()
        self.allocator.free(batch)

    def _batch(self, passed: PlacedPass, size: int, first: bool) -> None:
        before, self.input = self.input, None
        if before is not None:
            self.allocator.free(before)
        self.input = self.allocator.malloc(size * self.input_bytes)
        if first and self.training.zero_grad == "before_forward":
            self._drop_gradients()
        self._play(passed.forward)
        if self.output is not None:
            self.allocator.free(self.output)
        self.small -= self.output_bytes
        if first and self.training.zero_grad == "before_backward":
            self._drop_gradients()
        self._play(passed.backward if first else passed.backward_again)
        self.output = None if passed.output is None else self.live.pop(passed.output, None)
        self.output_bytes = 0 if passed.output is not None else passed.output_bytes
        if first:
            self.gradients = [self.live.pop(block) for block in passed.gradients]
            self.small_gradients = passed.small_gradient_bytes

    def _drop_gradients(self) -> None:
        for block in self.gradients:
            self.allocator.free(block)
        self.gradients = []
        self.small -= self.small_gradients
        self.small_gradients = 0

    def _play(self, part: PlacedPart) -> None:
        """Replay the events of a pass."""
        lt_bytes = self.profile.cublaslt_workspace_bytes if self.linear else 0
        self._count_small(part.small_net, part.small_peak + lt_bytes)
        if self.training.cudnn_benchmark:
            self._play_with_trials(part)
            return
        live, malloc, free = self.live, self.allocator.malloc, self.allocator.free
        for block, size in part.large:
            if size < 0:
                free(live.pop(block))
            else:
                live[block] = malloc(size)

    def _play_with_trials(self, part: PlacedPart) -> None:
        """Replay events; at the first call of each shape, cuDNN tries its plans, and the cache is emptied."""
        for index, (block, size) in enumerate(part.large):
            for call in part.calls.get(index, ()):
                if call not in self.tried:
                    self.tried.add(call)
                    self._try(call)
            if size < 0:
                self.allocator.free(self.live.pop(block))
            else:
                self.live[block] = self.allocator.malloc(size)

    def _try(self, call: Call) -> None:
        tried = self.allocator.reserved_bytes + trial_bytes(call, self.training.batch_size)
        self.trial_bytes = max(self.trial_bytes, tried + round_up(self.small, SMALL_SEGMENT_BYTES))
        self.allocator.empty_cache()

    def _optimizer_step(self, sizes: Sequence[int], together: bool) -> None:
        large = [size for size in sizes if size > SMALL_SIZE_BYTES]
        malloc, free = self.allocator.malloc, self.allocator.free
        if together:
            self._count_small(0, total_bytes([size for size in sizes if size <= SMALL_SIZE_BYTES]))
            for block in [malloc(size) for size in large][::-1]:
                free(block)
        else:
            for size in large:
                free(malloc(size))
