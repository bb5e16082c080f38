"""Replay of a recording through the simulated allocator, from its exact start state, and comparison with it."""

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.blocks import Device
from vramcast.virtual_gpu.allocator.state import SegmentView
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, MemoryEvent
from vramcast.virtual_gpu.recordings.rewinding import reserved_over_time, start_state

_OTHER_STREAM = -1
"""Stands for the streams that a freed block waits for: the recording does not name them."""


@dataclass
class Tally:
    """How many of the recorded items the replay gave."""

    recorded: int = 0
    equal: int = 0

    def count(self, equal: bool) -> None:
        """Add one item."""
        self.recorded += 1
        self.equal += equal

    @property
    def agrees(self) -> bool:
        """True if all are equal."""
        return self.recorded == self.equal


@dataclass
class ReplayAgreement:
    """A replay beside the recording that it came from."""

    addresses: Tally = field(default_factory=Tally)
    """Allocations at the recorded address."""
    segments_made: Tally = field(default_factory=Tally)
    """Segments, or mapped ranges, of the recorded size at the recorded event."""
    segments_freed: Tally = field(default_factory=Tally)
    releases: int = 0
    """How many times the cache was returned."""
    final_blocks: Tally = field(default_factory=Tally)
    """Blocks with the recorded address, size, requested size and state, out of those of both sides."""
    recorded_peak_bytes: int = 0
    """The largest size of all segments."""
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    """As torch.cuda.max_memory_allocated() counts it."""
    cut_allocations: int = 0
    """1 if the history begins in the midst of an allocation, which then is not compared."""
    first_event: int | None = None
    """The event of the first difference."""
    first_difference: str | None = None

    @property
    def agrees(self) -> bool:
        """True if everything is equal."""
        tallies = (self.addresses, self.segments_made, self.segments_freed, self.final_blocks)
        return all(item.agrees for item in tallies) and self.recorded_peak_bytes == self.peak_reserved_bytes


def agreement(device: DeviceRecording, options: AllocatorOptions, name: str) -> ReplayAgreement:
    """Replay a recording and compare every address, segment and block with it."""
    result = _compare(device, options, name)
    first = next((index for index, event in enumerate(device.events) if event.action is Action.ALLOC), None)
    if first is None or result.first_event is None or result.first_event > first:
        return result
    # The history may begin in the midst of an allocation, behind the release or the segment that belongs to it.
    rest = _compare(replace(device, events=device.events[first + 1 :]), options, name)
    return replace(rest, cut_allocations=1) if rest.agrees else result


def allocated_over_time(device: DeviceRecording, options: AllocatorOptions, name: str) -> "array[int]":
    """Return the allocated bytes after each event, as torch.cuda.memory_allocated() counts them."""
    comparison = _Comparison(device, start_state(device, options, name), options)
    comparison.run()
    return comparison.allocated


def _compare(device: DeviceRecording, options: AllocatorOptions, name: str) -> ReplayAgreement:
    start = start_state(device, options, name)
    return _Comparison(device, start, options).run()


def _lowest_pages(device: DeviceRecording, options: AllocatorOptions) -> dict[tuple[int, bool], int]:
    """Return the lowest page that events name, by stream and kind of pool: an expandable segment begins there or below.

    Pools of large blocks map and unmap pages of `large_segment_size_bytes`.
    """
    lowest: dict[tuple[int, bool], int] = {}
    for event in device.events:
        if event.action in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP):
            pool = event.stream, event.size_bytes % options.large_segment_size_bytes != 0
            lowest[pool] = min(event.address, lowest.get(pool, event.address))
    return lowest


class RecordedDevice(Device):
    """A device that gives memory at recorded addresses."""

    def __init__(self) -> None:
        super().__init__(None)
        self.expected: deque[MemoryEvent] = deque()
        """Segments that were made since the last allocation, and that the next one must ask for."""
        self.made = Tally()
        self.unexpected = 0
        """Segments that the recording does not have at this event."""
        self.freed: list[int] = []
        """Sizes that were given back since the list was emptied."""

    def take(self, size_bytes: int) -> bool:
        """Take memory, and compare it with the next recorded segment."""
        if not super().take(size_bytes):
            return False
        self._last = self.expected[0].address if self.expected else None
        if self.expected and self.expected[0].size_bytes == size_bytes:
            self.expected.popleft()
            self.made.count(True)
        else:
            self.unexpected += 1
        return True

    def address_space(self, size_bytes: int, alignment_bytes: int) -> int:
        """Return the recorded address; of a fixed segment, `take` has seen it already."""
        if alignment_bytes and self.expected and self.expected[0].action is Action.SEGMENT_MAP:
            return self.expected[0].address
        address = getattr(self, "_last", None)
        return address if address is not None else super().address_space(size_bytes, alignment_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Return memory, and note its size."""
        super().give_back(size_bytes)
        self.freed.append(size_bytes)


def _bytes(events: Iterable[MemoryEvent]) -> int:
    return sum(event.size_bytes for event in events)


class _Comparison:
    """One replay, event by event.

    Frees that end later than they were requested, and segments that are made and returned, are held back until the
    next allocation: they may be parts of it, as `malloc` empties the cache where the device is full.
    """

    def __init__(self, device: DeviceRecording, start: list[SegmentView], options: AllocatorOptions) -> None:
        self._recording = device
        self._options = options
        self._device = RecordedDevice()
        self._allocator = CachingAllocator(None, options, device=self._device)
        self._live = self._allocator.restore(start, _lowest_pages(device, options))
        self._device.made, self._device.unexpected = Tally(), 0
        self._completed: list[Block] = []
        self._released: list[MemoryEvent] = []
        self._made_first = 0
        """Bytes that were taken before the cache was returned: an attempt that failed."""
        self.result = ReplayAgreement()
        self.allocated = array("q")
        """Allocated bytes after each event."""

    def run(self) -> ReplayAgreement:
        """Replay all events and return the comparison."""
        for index, event in enumerate(self._recording.events):
            self._replay(index, event)
            self.allocated.append(self._allocator.allocated_bytes)
        self._let_go(len(self._recording.events))
        result = self.result
        made = self._device.made
        result.segments_made = Tally(made.recorded + self._device.unexpected, made.equal)
        self._compare_final()
        final_bytes = sum(segment.size_bytes for segment in self._recording.final)
        result.recorded_peak_bytes = max(reserved_over_time(self._recording), default=final_bytes)
        result.peak_reserved_bytes = self._allocator.peak_reserved_bytes
        result.peak_allocated_bytes = self._allocator.peak_allocated_bytes
        return result

    def _replay(self, index: int, event: MemoryEvent) -> None:
        action = event.action
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            self._device.expected.append(event)
        elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            if not self._released:
                self._made_first = _bytes(self._device.expected)
            self._released.append(event)
        elif action in (Action.ALLOC, Action.OOM):
            self._allocate(index, event)
        elif action is Action.FREE_REQUESTED:
            self._let_go(index)
            self._request_free(index, event)
        elif action is Action.FREE_COMPLETED:
            self._complete_free(index, event)

    def _allocate(self, index: int, event: MemoryEvent) -> None:
        """Replay an allocation, or one that failed."""
        failed = event.action is Action.OOM
        if (failed or self._released) and self._is_retry(event):
            self._device.capacity_bytes = self._capacity()
        else:
            self._let_go(index)
        block = self._malloc(event)
        if block is None and not failed:  # no rule explains the recorded segments
            self._device.capacity_bytes = None
            block = self._malloc(event)
        self._device.capacity_bytes = None
        self._complete()
        self._settle_release(index)
        self._settle_segments(index)
        if block is not None:
            if failed:
                self._allocator.free(block)
            else:
                self._compare_address(index, event, block)

    def _malloc(self, event: MemoryEvent) -> Block | None:
        try:
            return self._allocator.malloc(event.size_bytes, event.stream)
        except OutOfMemory:
            return None

    def _is_retry(self, event: MemoryEvent) -> bool:
        """Return True if `malloc` itself returned the segments, because the device was full.

        Otherwise the script did, with torch.cuda.empty_cache(). Both are tried on a copy of the state.
        """
        if event.action is Action.OOM:
            return True
        trial = _Comparison(self._recording, self._allocator.segments(), self._options)
        trial._completed = [trial._live[block.address] for block in self._completed]
        trial._released = list(self._released)
        trial._device.expected.extend(self._device.expected)
        trial._let_go(0)
        block = trial._malloc(event)
        explains = block is not None and block.address == event.address and trial.result.segments_freed.agrees
        return not (explains and not trial._device.expected and not trial._device.unexpected)

    def _capacity(self) -> int:
        """Return the least capacity with which the recorded segments could be made, before and after the release."""
        first = self._device.taken_bytes + self._made_first
        return max(first, self._device.taken_bytes + _bytes(self._device.expected) - _bytes(self._released))

    def _compare_address(self, index: int, event: MemoryEvent, block: Block) -> None:
        equal = block.address == event.address
        self.result.addresses.count(equal)
        if not equal:
            self._differ(index, f"{event.size_bytes} bytes at {event.address:#x}, simulated at {block.address:#x}")
        self._live[event.address] = block

    def _request_free(self, index: int, event: MemoryEvent) -> None:
        block = self._live.get(event.address)
        if block is None or not block.allocated or block.waits:
            self._differ(index, f"a free at {event.address:#x}, simulated none")
            return
        events = self._recording.events
        following = events[index + 1] if index + 1 < len(events) else None
        if following is None or (following.action, following.address) != (Action.FREE_COMPLETED, event.address):
            self._allocator.record_stream(block, _OTHER_STREAM)
            self._allocator.free(block)

    def _complete_free(self, index: int, event: MemoryEvent) -> None:
        block = self._live.pop(event.address, None)
        if block is None or not block.allocated:
            self._differ(index, f"a completed free at {event.address:#x}, simulated none")
        elif block.waits:
            self._completed.append(block)
        else:
            self._allocator.free(block)

    def _let_go(self, index: int) -> None:
        """End frees and return the cache outside of an allocation: torch.cuda.empty_cache(), or passed events."""
        self._complete()
        if self._released:
            self._allocator.empty_cache()
            self._settle_release(index)

    def _complete(self) -> None:
        for block in self._completed:
            if block.waits:
                self._allocator.finish(block)
        self._completed.clear()

    def _settle_release(self, index: int) -> None:
        """Compare what was returned with the recording."""
        if self._released or self._device.freed:
            recorded = Counter(item.size_bytes for item in self._released)
            simulated = Counter(self._device.freed)
            tally = self.result.segments_freed
            self.result.releases += 1
            tally.recorded += max(recorded.total(), simulated.total())
            tally.equal += (recorded & simulated).total()
            if recorded != simulated:
                self._differ(index, f"segments returned: {sorted(recorded)}, simulated {sorted(simulated)}")
        self._released.clear()
        self._device.freed.clear()
        self._made_first = 0

    def _settle_segments(self, index: int) -> None:
        """Count recorded segments that no allocation asked for."""
        for event in self._device.expected:
            self._device.made.count(False)
            self._differ(index, f"a segment of {event.size_bytes} bytes, simulated none")
        self._device.expected.clear()

    def _compare_final(self) -> None:
        recorded = {block.address: block for view in self._recording.final for block in view.blocks}
        simulated = {block.address: block for view in self._allocator.segments() for block in view.blocks}
        for address in recorded.keys() | simulated.keys():
            equal = recorded.get(address) == simulated.get(address)
            self.result.final_blocks.count(equal)
            if not equal:
                self._differ(len(self._recording.events), f"the last block at {address:#x}: {recorded.get(address)}")

    def _differ(self, index: int, text: str) -> None:
        if self.result.first_difference is None:
            self.result.first_event = index
            self.result.first_difference = f"event {index:,}: recorded {text}"
