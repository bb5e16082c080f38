"""Running the births and deaths of storages through a caching allocator."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vramcast.virtual_gpu.allocator import Block, CachingAllocator, OutOfMemory

FREE = -1
"""In the place of a size: the block dies."""

Event = tuple[int, int]
"""(block id, size in bytes), (block id, FREE), or EMPTY_CACHE."""

EMPTY_CACHE: Event = (-1, FREE)
"""The cache goes back to the card, as torch.cuda.empty_cache() does."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a sequence of events came to. Indices of events are None where nothing rose above the start."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    requested_peak_event: int | None
    """The event at which the requested bytes first reached their peak; the others likewise."""
    peak_event: int | None
    """Of the allocated bytes."""
    reserved_peak_event: int | None
    live_at_peak: tuple[int, ...]
    """Blocks alive when the requested bytes peaked, in the order of their birth."""
    retries: int
    forgone: frozenset[int] = frozenset()
    """Optional blocks that there was no room for."""
    oom_event: int | None = None
    """The allocation that failed, and the last event that was looked at."""
    oom_message: str | None = None
    allocated_timeline: "array[int] | None" = None
    """Allocated bytes after each event, without the one that failed."""
    reserved_timeline: "array[int] | None" = None


class _Recorder:
    """Follows an allocator's peaks from event to event."""

    def __init__(self, allocator: CachingAllocator, timeline: bool, base_bytes: int) -> None:
        allocator.reset_peaks()
        self.allocator = allocator
        self.base_bytes = base_bytes
        self.retries = allocator.retries
        self.peaks = (allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
        self.events: list[int | None] = [None, None, None]
        self.allocated = array("q") if timeline else None
        self.reserved = array("q") if timeline else None

    def note_peaks(self, index: int) -> None:
        """Look for new peaks, after an allocation."""
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
        """The record as a whole."""
        requested, allocated, reserved = (self.base_bytes + peak for peak in self.peaks)
        return Replay(
            peak_requested_bytes=requested,
            peak_allocated_bytes=allocated,
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
        )


def replay(
    events: Sequence[Event],
    allocator: CachingAllocator,
    *,
    base_bytes: int = 0,
    timeline: bool = False,
    handles: dict[int, Block] | None = None,
    optional: Collection[int] = (),
) -> Replay:
    """Run events through an allocator, up to the first that does not fit.

    The allocator's peaks start anew. `base_bytes` stand for what is held outside the events: they are added to every
    figure, and not taken from the allocator's capacity. `handles` are the live blocks of an earlier replay on the same
    allocator, by id, kept up to date: with them, steps of training can be replayed one by one. `optional` blocks are
    those whose taker can do without: cuDNN tries a plan with less workspace where the allocator has no room.
    """
    live = {} if handles is None else handles
    forgone: set[int] = set()
    before = tuple(live)
    record = _Recorder(allocator, timeline, base_bytes)
    oom, index = None, -1
    try:
        for index, (block, size_bytes) in enumerate(events):
            if block < 0:
                allocator.empty_cache()
            elif size_bytes == FREE:
                allocator.free(_take(live, block, index))
            else:
                _check_birth(live, block, size_bytes, index)
                live[block] = _give(allocator, size_bytes, block in optional, forgone, block)
                record.note_peaks(index)
            record.note_time()
    except OutOfMemory as error:
        oom = error
        record.note_peaks(index)  # mapping pages may have come to a peak before it failed
    alive = tuple(block for block in _alive(before, events, record.events[0]) if block not in forgone)
    return record.replay(alive, forgone, index if oom else None, oom)


def _give(allocator: CachingAllocator, size_bytes: int, is_optional: bool, forgone: set[int], block: int) -> Block:
    """A block; one that its taker can do without is empty where there is no room."""
    try:
        return allocator.malloc(size_bytes)
    except OutOfMemory:
        if not is_optional:
            raise
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
    """Ids that are alive after an event, found in a second pass: cheaper than a copy at every new peak."""
    alive = dict.fromkeys(before)
    for block, size_bytes in events[: 0 if last is None else last + 1]:
        if size_bytes != FREE:
            alive[block] = None
        elif block >= 0:
            del alive[block]
    return tuple(alive)
