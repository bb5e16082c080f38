"""Replay of allocations and frees through a caching allocator."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.streams import StreamOperation, apply_operation

FREE = -1
"""In place of a size: the block is freed."""

Event = tuple[int, int]
"""(block id, size in bytes), (block id, FREE), EMPTY_CACHE, or (STREAM_OPERATION, index of the operation)."""

EMPTY_CACHE: Event = (-1, FREE)
"""The allocator returns its cache, as torch.cuda.empty_cache() does."""

STREAM_OPERATION = -2
"""In place of a block id: an operation on streams."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of a replay. Indices of events are None if nothing rose above the start."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_active_bytes: int
    """Allocated bytes and freed blocks that another stream still uses."""
    peak_reserved_bytes: int
    requested_peak_event: int | None
    """The first event at which the requested bytes reached their peak; the same for the fields below."""
    peak_event: int | None
    """The peak of the allocated bytes."""
    reserved_peak_event: int | None
    live_at_peak: tuple[int, ...]
    """Blocks that were allocated when the requested bytes peaked, in order of allocation."""
    retries: int
    forgone: frozenset[int] = frozenset()
    """Optional blocks that did not fit."""
    oom_event: int | None = None
    """The allocation that failed, which ends the replay."""
    oom_message: str | None = None
    allocated_timeline: "array[int] | None" = None
    """Allocated bytes after each event, without the one that failed."""
    reserved_timeline: "array[int] | None" = None
    before_emptying: tuple[tuple[int, int], ...] = ()
    """Allocated and reserved bytes each time before the cache was emptied."""


class _Recorder:
    """Follows the peaks of an allocator from event to event."""

    def __init__(self, allocator: CachingAllocator, timeline: bool, base_bytes: int) -> None:
        allocator.reset_peaks()
        self.allocator = allocator
        self.base_bytes = base_bytes
        self.retries = allocator.retries
        self.peaks = (allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
        self.events: list[int | None] = [None, None, None]
        self.allocated = array("q") if timeline else None
        self.reserved = array("q") if timeline else None
        self.before_emptying: list[tuple[int, int]] = []

    def empty_cache(self) -> None:
        """Empty the allocator's cache, and note what it held."""
        self.before_emptying.append((self.allocator.allocated_bytes, self.allocator.reserved_bytes))
        self.allocator.empty_cache()

    def note_peaks(self, index: int) -> None:
        """Update the peaks after an allocation."""
        source = self.allocator
        peaks = (source.peak_requested_bytes, source.peak_allocated_bytes, source.peak_reserved_bytes)
        if peaks != self.peaks:
            self.events = [
                event if new == old else index for event, new, old in zip(self.events, peaks, self.peaks, strict=True)
            ]
            self.peaks = peaks

    def note_time(self) -> None:
        """Add a point to the timelines."""
        if self.allocated is not None and self.reserved is not None:
            self.allocated.append(self.base_bytes + self.allocator.allocated_bytes)
            self.reserved.append(self.base_bytes + self.allocator.reserved_bytes)

    def replay(
        self, live_at_peak: tuple[int, ...], forgone: set[int], oom_event: int | None, oom: OutOfMemory | None
    ) -> Replay:
        """Return the result."""
        requested, allocated, reserved = (self.base_bytes + peak for peak in self.peaks)
        return Replay(
            peak_requested_bytes=requested,
            peak_allocated_bytes=allocated,
            peak_active_bytes=self.base_bytes + self.allocator.peak_active_bytes,
            peak_reserved_bytes=reserved,
            requested_peak_event=self.events[0],
            peak_event=self.events[1],
            reserved_peak_event=self.events[2],
            live_at_peak=live_at_peak,
            retries=self.allocator.retries - self.retries,
            forgone=frozenset(forgone),
            oom_event=oom_event,
            oom_message=str(oom) if oom else None,
            allocated_timeline=self.allocated,
            reserved_timeline=self.reserved,
            before_emptying=tuple(self.before_emptying),
        )


def replay(
    events: Sequence[Event],
    allocator: CachingAllocator,
    *,
    base_bytes: int = 0,
    timeline: bool = False,
    handles: dict[int, Block] | None = None,
    optional: Collection[int] = (),
    streams: Mapping[int, int] | None = None,
    operations: Sequence[StreamOperation] = (),
) -> Replay:
    """Replay events through an allocator, up to the first allocation that does not fit.

    Args:
        events: Allocations and frees in program order.
        allocator: The allocator, whose peaks are reset first.
        base_bytes: Memory outside the events. It is added to every figure and not taken from the capacity.
        timeline: Record the allocated and reserved bytes after each event.
        handles: Live blocks of an earlier replay on the same allocator, by id. They are updated, so that the steps of
            a training run can be replayed one by one.
        optional: Blocks that may be forgone. cuDNN tries a plan with less workspace if an allocation fails.
        streams: The stream of each block that is not on the main stream.
        operations: The operations on streams that events refer to by index.
    """
    live = {} if handles is None else handles
    forgone: set[int] = set()
    before = tuple(live)
    record = _Recorder(allocator, timeline, base_bytes)
    oom, index = None, -1
    try:
        for index, (block, size_bytes) in enumerate(events):
            if block < 0:
                if block == STREAM_OPERATION:
                    apply_operation(operations[size_bytes], allocator, live)
                else:
                    record.empty_cache()
            elif size_bytes == FREE:
                allocator.free(_take(live, block, index))
            else:
                _check_birth(live, block, size_bytes, index)
                stream = streams.get(block, MAIN_STREAM) if streams else MAIN_STREAM
                if block in optional:
                    live[block] = _allocate_optional(allocator, size_bytes, stream, forgone, block)
                else:
                    live[block] = allocator.malloc(size_bytes, stream)
                record.note_peaks(index)
            record.note_time()
    except OutOfMemory as error:
        oom = error
        record.note_peaks(index)  # mapped pages may have reached a peak before the failure
    alive = tuple(block for block in _alive(before, events, record.events[0]) if block not in forgone)
    return record.replay(alive, forgone, index if oom else None, oom)


def _allocate_optional(
    allocator: CachingAllocator, size_bytes: int, stream: int, forgone: set[int], block: int
) -> Block:
    """Allocate a block, or an empty one if it does not fit."""
    try:
        return allocator.malloc(size_bytes, stream)
    except OutOfMemory:
        forgone.add(block)
        return allocator.malloc(0)


def _take(live: dict[int, Block], block: int, index: int) -> Block:
    try:
        return live.pop(block)
    except KeyError:
        raise ValueError(f"event {index} frees block {block}, which is not allocated") from None


def _check_birth(live: dict[int, Block], block: int, size_bytes: int, index: int) -> None:
    if block in live:
        raise ValueError(f"event {index} allocates block {block}, which is allocated already")
    if size_bytes < 0:
        raise ValueError(f"event {index} allocates {size_bytes} bytes: expected a size from 0, or {FREE} to free")


def _alive(before: tuple[int, ...], events: Sequence[Event], last: int | None) -> tuple[int, ...]:
    """Return the ids that are allocated after an event; a second pass is cheaper than a copy at every new peak."""
    alive = dict.fromkeys(before)
    for block, size_bytes in events[: 0 if last is None else last + 1]:
        if block < 0:
            continue
        if size_bytes != FREE:
            alive[block] = None
        else:
            del alive[block]
    return tuple(alive)
