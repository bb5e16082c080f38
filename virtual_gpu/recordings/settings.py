"""Replays of a recorded stream under other settings, on a device of limited size.

Under the recorded settings and below a device's limit the start state is the recorded one. Otherwise blocks that
existed before the first event are allocated anew, in the order of their addresses, since their history is not known.
Frees and the script's own torch.cuda.empty_cache() stay where they were recorded.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import round_up
from vramcast.virtual_gpu.allocator.state import BlockState, SegmentView
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, MemoryEvent


@dataclass(frozen=True)
class Outcome:
    """The result of a replay."""

    failed_event: int | None
    """The first allocation that does not fit, -1 for a block that existed before."""
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int
    """How many times the allocator returned its cache because the device was full."""


Sizing = Callable[[int, MemoryEvent], int]
"""Returns the size of an allocation, by its event."""


def replay_under(
    device: DeviceRecording,
    start: Sequence[SegmentView],
    options: AllocatorOptions,
    *,
    capacity_bytes: int | None = None,
    same_start: bool = False,
    sizing: Sizing | None = None,
    emptied: Collection[int] = (),
) -> Outcome:
    """Replay a recording with other settings.

    Args:
        device: The recording. An allocation that failed there is tried, too, and freed at once.
        start: The state before the first event.
        options: Settings of the allocator.
        capacity_bytes: Memory that the device has for this process.
        same_start: Take over the recorded segments in the place of new ones.
        sizing: Gives allocations other sizes.
        emptied: Events before which the cache is returned.
    """
    if options.garbage_collection_threshold and capacity_bytes is not None:
        # The threshold counts where a memory fraction is set. This one leaves all of the device to the process.
        total_bytes = round_up(capacity_bytes, 1 << 20) + (1 << 20)
    else:
        total_bytes = capacity_bytes or 0
    allocator = CachingAllocator(capacity_bytes, options, total_bytes=total_bytes or None)
    index = -1
    try:
        live = allocator.restore(start) if same_start else _allocated_anew(allocator, start)
        for index, event in enumerate(device.events):
            if index in emptied:
                allocator.empty_cache()
            if event.action in (Action.ALLOC, Action.OOM):
                size = sizing(index, event) if sizing else event.size_bytes
                block = allocator.malloc(size, event.stream)
                if event.action is Action.OOM:
                    allocator.free(block)
                else:
                    live[event.address] = block
            elif event.action is Action.FREE_COMPLETED and event.address in live:
                allocator.free(live.pop(event.address))
    except OutOfMemory:
        return _outcome(allocator, index)
    return _outcome(allocator, None)


def _outcome(allocator: CachingAllocator, failed: int | None) -> Outcome:
    return Outcome(failed, allocator.peak_reserved_bytes, allocator.peak_allocated_bytes, allocator.retries)


def _allocated_anew(allocator: CachingAllocator, start: Sequence[SegmentView]) -> dict[int, Block]:
    return {
        block.address: allocator.malloc(block.requested_bytes, view.stream)
        for view in start
        for block in view.blocks
        if block.state is not BlockState.FREE
    }
