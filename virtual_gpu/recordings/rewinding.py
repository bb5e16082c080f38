"""The state of an allocator before its recorded history: the final state with all events undone, the last one first.

A ring buffer keeps the last events, so blocks and segments may exist before the first of them. Their sizes follow from
the final state, with one gap: the size of a block that exists before the first event and is freed later. The allocator
splits a block of its large pools where more than 1 MiB would remain, and the rest belongs to the block otherwise. The
rest is what was free to the right of the block, if that is at most 1 MiB: a free block of a large pool is larger. If
more was free, the rest is known once a block was allocated behind it, and taken as none if that never happened.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import SMALL_SEGMENT_BYTES, SMALL_SIZE_BYTES
from vramcast.virtual_gpu.allocator.state import BlockState, BlockView, SegmentView
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, MemoryEvent, RecordingError

_NEAR_BYTES = 1 << 36
"""Distance within one address space."""


def start_state(device: DeviceRecording, options: AllocatorOptions, name: str) -> list[SegmentView]:
    """Return the segments of a device before its first event, by address."""
    state = _State(device, options)
    for index in range(len(device.events) - 1, -1, -1):
        event = device.events[index]
        undo = _UNDO.get(event.action)
        if undo is not None and not undo(state, event):
            raise RecordingError(
                name, "events that lead to the final state", f"event {index:,} ({event.action}), which does not"
            )
    return state.segments()


def reserved_over_time(device: DeviceRecording) -> list[int]:
    """Return the size of all segments after each event, from the recording alone; the last one is the final state's."""
    reserved = sum(segment.view.size_bytes for segment in device.segments)
    sizes = []
    for event in reversed(device.events):
        sizes.append(reserved)
        if event.action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            reserved -= event.size_bytes
        elif event.action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            reserved += event.size_bytes
    return sizes[::-1]


@dataclass(slots=True)
class _Block:
    """A block while events are undone."""

    address: int
    size_bytes: int
    owner: tuple[int, int, bool]
    """Address (-1 if expandable), stream and kind of the segment: blocks of one owner merge."""
    state: BlockState = BlockState.FREE
    requested_bytes: int = 0
    uncertain: bool = False
    """More may belong to the block than its rounded request."""


class _State:
    """Blocks by their start and their end."""

    def __init__(self, device: DeviceRecording, options: AllocatorOptions) -> None:
        self._options = options
        self._round: Callable[[int], int] = CachingAllocator(None, options).round_size
        self._starts: dict[int, _Block] = {}
        self._ends: dict[int, _Block] = {}
        self._free: list[int] = []
        """Addresses of free blocks, sorted."""
        for segment in device.segments:
            view = segment.view
            owner = (-1 if segment.expandable else view.address, view.stream, view.small)
            for block in view.blocks:
                self._insert(_Block(block.address, block.size_bytes, owner, block.state, block.requested_bytes))

    def segments(self) -> list[SegmentView]:
        """Return the state as segments; of expandable ones, each contiguous range."""
        runs: list[list[_Block]] = []
        for address in sorted(self._starts):
            block = self._starts[address]
            last = runs[-1][-1] if runs else None
            if last and last.owner == block.owner and last.address + last.size_bytes == address:
                runs[-1].append(block)
            else:
                runs.append([block])
        return [_segment(run) for run in runs]

    def undo_alloc(self, event: MemoryEvent) -> bool:
        """Free a block."""
        block = self._starts.get(event.address)
        if block is None or block.state is BlockState.FREE:
            return False
        self._settle_left(block)
        self._remove(block)
        self._insert_free(block)
        return True

    def _settle_left(self, block: _Block) -> None:
        """Give the block on the left its rest: this one was cut off the free block that began behind it."""
        rest = self._ends.get(block.address)
        if rest is None or rest.owner != block.owner:
            return
        rest.uncertain = False
        left = self._ends.get(rest.address) if rest.state is BlockState.FREE else None
        if left is None or left.owner != block.owner or not left.uncertain or rest.size_bytes > SMALL_SIZE_BYTES:
            return
        self._remove(rest)
        self._remove(left)
        left.size_bytes += rest.size_bytes
        left.uncertain = False
        self._insert(left)

    def undo_request(self, event: MemoryEvent) -> bool:
        """Let a caller hold a block again."""
        block = self._starts.get(event.address)
        if block is None or block.state is not BlockState.AWAITING_FREE:
            return False
        block.state = BlockState.ALLOCATED
        return True

    def undo_free(self, event: MemoryEvent) -> bool:
        """Take a block out of the free one that it merged into."""
        size = self._round(event.size_bytes)
        whole = self._free_around(event.address, size)
        if whole is None:
            return False
        rest = whole.address + whole.size_bytes - event.address - size
        expandable = whole.owner[0] < 0
        splits = whole.owner[2] or expandable
        limit = self._options.max_split_size_bytes
        takes_rest = not splits and (rest <= SMALL_SIZE_BYTES or (limit is not None and size >= limit))
        self._remove(whole)
        if event.address > whole.address:
            self._insert(_Block(whole.address, event.address - whole.address, whole.owner))
        block = _Block(event.address, size + (rest if takes_rest else 0), whole.owner, BlockState.AWAITING_FREE)
        block.requested_bytes = event.size_bytes
        block.uncertain = not splits and not takes_rest
        self._insert(block)
        if rest and not takes_rest:
            self._insert(_Block(event.address + size, rest, whole.owner))
        return True

    def undo_segment_alloc(self, event: MemoryEvent) -> bool:
        """Remove free memory that was not there before."""
        whole = self._free_around(event.address, event.size_bytes)
        if whole is None:
            return False
        self._remove(whole)
        if event.address > whole.address:
            self._insert(_Block(whole.address, event.address - whole.address, whole.owner))
        end, whole_end = event.address + event.size_bytes, whole.address + whole.size_bytes
        if end < whole_end:
            self._insert(_Block(end, whole_end - end, whole.owner))
        return True

    def undo_segment_free(self, event: MemoryEvent) -> bool:
        """Restore free memory that was returned."""
        expandable = event.action is Action.SEGMENT_UNMAP
        small = self._is_small(event, expandable)
        owner = (-1 if expandable else event.address, event.stream, small)
        self._insert_free(_Block(event.address, event.size_bytes, owner))
        return True

    def _is_small(self, event: MemoryEvent, expandable: bool) -> bool:
        """Return True for memory of a small pool.

        Pools of large blocks unmap whole pages of `large_segment_size_bytes`, pools of small ones rarely as much; then
        the pool with the nearest memory is taken.
        """
        if not expandable:
            return event.size_bytes <= SMALL_SEGMENT_BYTES
        if event.size_bytes % self._options.large_segment_size_bytes:
            return True
        distances = {True: _NEAR_BYTES, False: 1 << 64}
        for block in self._starts.values():
            owner, stream, small = block.owner
            if (owner, stream) == (-1, event.stream):
                distances[small] = min(distances[small], abs(block.address - event.address))
        return distances[True] < min(distances[False], _NEAR_BYTES)

    def _free_around(self, address: int, size_bytes: int) -> _Block | None:
        """Return the free block that holds a range."""
        index = bisect_right(self._free, address) - 1
        if index < 0:
            return None
        block = self._starts[self._free[index]]
        return block if address + size_bytes <= block.address + block.size_bytes else None

    def _insert_free(self, block: _Block) -> None:
        """Insert a block as a free one, merged with its free neighbours."""
        left, right = self._ends.get(block.address), self._starts.get(block.address + block.size_bytes)
        start, end = block.address, block.address + block.size_bytes
        for other in (left, right):
            if other is not None and other.state is BlockState.FREE and other.owner == block.owner:
                self._remove(other)
                start, end = min(start, other.address), max(end, other.address + other.size_bytes)
        self._insert(_Block(start, end - start, block.owner))

    def _insert(self, block: _Block) -> None:
        self._starts[block.address] = block
        self._ends[block.address + block.size_bytes] = block
        if block.state is BlockState.FREE:
            insort(self._free, block.address)

    def _remove(self, block: _Block) -> None:
        del self._starts[block.address]
        self._ends.pop(block.address + block.size_bytes, None)
        if block.state is BlockState.FREE:
            del self._free[bisect_left(self._free, block.address)]


def _segment(blocks: list[_Block]) -> SegmentView:
    _, stream, small = blocks[0].owner
    views = tuple(BlockView(block.address, block.size_bytes, block.requested_bytes, block.state) for block in blocks)
    return SegmentView(blocks[0].address, sum(block.size_bytes for block in blocks), small, views, stream)


_UNDO: dict[Action, Callable[[_State, MemoryEvent], bool]] = {
    Action.ALLOC: _State.undo_alloc,
    Action.FREE_REQUESTED: _State.undo_request,
    Action.FREE_COMPLETED: _State.undo_free,
    Action.SEGMENT_ALLOC: _State.undo_segment_alloc,
    Action.SEGMENT_MAP: _State.undo_segment_alloc,
    Action.SEGMENT_FREE: _State.undo_segment_free,
    Action.SEGMENT_UNMAP: _State.undo_segment_free,
}
