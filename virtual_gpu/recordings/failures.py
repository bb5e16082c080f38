"""Why an allocation of a recording failed, and the settings that would have let it pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB, segment_bytes
from vramcast.virtual_gpu.allocator.state import SegmentView
from vramcast.virtual_gpu.recordings.contents import BlockKind, Contents, Kinds, Life
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, MemoryEvent, Recording
from vramcast.virtual_gpu.recordings.settings import Outcome, Sizing, replay_under

SPLIT_LIMITS_MIB = (512, 256, 128, 64, 32)
SMALLER_BATCHES = (0.9, 0.75, 0.5, 0.25)
_SCALED = (BlockKind.ACTIVATIONS, BlockKind.TEMPORARIES)
"""Kinds that grow with the batch."""


@dataclass(frozen=True)
class Failure:
    """An allocation that failed, with the memory around it."""

    event: int
    requested_bytes: int
    segment_bytes: int
    """Memory that the allocator asked the device for."""
    device_free_bytes: int
    capacity_bytes: int
    """Memory that the device had for this process: its segments and what was free."""
    contents: Contents

    @property
    def lacks_bytes(self) -> int:
        """Memory that even a device without fragmentation would lack; negative if it would have been enough."""
        return self.contents.allocated_bytes + self.requested_bytes - self.capacity_bytes

    @property
    def is_fragmentation(self) -> bool:
        """True if all free memory together would have served the request."""
        return self.lacks_bytes <= 0

    @property
    def is_limited(self) -> bool:
        """True if the device had enough free memory: a limit of the process refused it."""
        return self.device_free_bytes >= self.segment_bytes


@dataclass(frozen=True)
class Remedy:
    """A setting, and the result of the replay under it."""

    name: str
    setting: str
    """As a user writes it."""
    passes: bool
    """The allocation that failed passes."""
    completes: bool
    """All recorded events pass."""
    peak_reserved_bytes: int


def last_failure(device: DeviceRecording) -> int | None:
    """Return the event of the last allocation that failed."""
    failed = [index for index, event in enumerate(device.events) if event.action is Action.OOM]
    return failed[-1] if failed else None


def failure_at(event: int, recorded: MemoryEvent, contents: Contents, options: AllocatorOptions) -> Failure:
    """Return the failure of an allocation with the contents at that event."""
    return Failure(
        event=event,
        requested_bytes=recorded.size_bytes,
        segment_bytes=segment_bytes(recorded.size_bytes, options.large_segment_size_bytes),
        device_free_bytes=recorded.address,
        capacity_bytes=contents.reserved_bytes + recorded.address,
        contents=contents,
    )


def remedies(
    recording: Recording,
    device: DeviceRecording,
    start: Sequence[SegmentView],
    blocks: Sequence[Life],
    failure: Failure,
) -> list[Remedy]:
    """Return the settings that were tried, with their results."""
    capacity = max(failure.capacity_bytes, _start_bytes(start))
    tried = []
    for name, setting, options in _settings(recording.options, capacity):
        same_start = options.expandable_segments == recording.options.expandable_segments
        outcome = replay_under(device, start, options, capacity_bytes=capacity, same_start=same_start)
        tried.append(_remedy(name, setting, outcome, failure))
    emptied = {_lowest_event(device, failure.event)}
    outcome = replay_under(device, start, recording.options, capacity_bytes=capacity, same_start=True, emptied=emptied)
    tried.append(_remedy("empty cache", "torch.cuda.empty_cache() where the least is allocated", outcome, failure))
    kinds = Kinds(recording, device)
    scaled = {life.born for life in blocks if life.born >= 0 and kinds.of(life) in _SCALED}
    for part in SMALLER_BATCHES:
        outcome = replay_under(
            device, start, recording.options, capacity_bytes=capacity, same_start=True, sizing=_scaling(scaled, part)
        )
        remedy = _remedy("smaller batch", f"{part:.0%} of the batch", outcome, failure)
        tried.append(remedy)
        if remedy.completes:
            break
    return tried


def _settings(recorded: AllocatorOptions, capacity: int) -> Iterator[tuple[str, str, AllocatorOptions]]:
    """Yield the settings of the allocator that may help, as PYTORCH_ALLOC_CONF has them."""
    if not recorded.expandable_segments:
        options = replace(recorded, expandable_segments=True)
        yield "expandable segments", "PYTORCH_ALLOC_CONF=expandable_segments:True", options
        for limit in SPLIT_LIMITS_MIB:
            options = replace(recorded, max_split_size_bytes=limit * MIB)
            yield "split limit", f"PYTORCH_ALLOC_CONF=max_split_size_mb:{limit}", options
    total = capacity + 2 * MIB
    options = replace(recorded, garbage_collection_threshold=0.8, memory_fraction=capacity / total)
    words = "PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8 and torch.cuda.set_per_process_memory_fraction()"
    yield "garbage collection", words, options


def _remedy(name: str, setting: str, outcome: Outcome, failure: Failure) -> Remedy:
    passes = outcome.failed_event is None or outcome.failed_event > failure.event
    return Remedy(name, setting, passes, outcome.failed_event is None, outcome.peak_reserved_bytes)


def _scaling(scaled: set[int], part: float) -> Sizing:
    """Return sizes in which the blocks that depend on the batch, and the one that failed, are smaller."""

    def size(index: int, event: MemoryEvent) -> int:
        if index in scaled or event.action is Action.OOM:
            return max(int(event.size_bytes * part), 1)
        return event.size_bytes

    return size


def _lowest_event(device: DeviceRecording, before: int) -> int:
    """Return the event before a failure with the least memory in use: between two steps, if the history has one."""
    size = lowest = 0
    place = 0
    for index, event in enumerate(device.events[:before]):
        if event.action is Action.ALLOC:
            size += event.size_bytes
        elif event.action is Action.FREE_COMPLETED:
            size -= event.size_bytes
            if size <= lowest:
                lowest, place = size, index + 1
    return place


def _start_bytes(start: Sequence[SegmentView]) -> int:
    return sum(view.size_bytes for view in start)
