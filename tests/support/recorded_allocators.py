"""An allocator that records itself as torch does: recordings whose truth is known, made without a GPU."""

import random
from collections.abc import Sequence
from typing import Any

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.blocks import Device
from vramcast.virtual_gpu.allocator.state import SegmentView

TOTAL_BYTES = 80 << 30


class _RecordingDevice(Device):
    """A device whose gifts and returns become events."""

    def __init__(self, capacity_bytes: int | None, events: list[dict[str, Any]]) -> None:
        super().__init__(capacity_bytes)
        self.events = events
        self.changes: list[int] = []
        """Sizes that were taken, and the negative of those that were returned."""

    def take(self, size_bytes: int) -> bool:
        taken = super().take(size_bytes)
        if taken:
            self.changes.append(size_bytes)
        return taken

    def give_back(self, size_bytes: int) -> None:
        super().give_back(size_bytes)
        self.changes.append(-size_bytes)


class RecordedAllocator:
    """A caching allocator with its history, in the format of torch.cuda.memory._snapshot()."""

    def __init__(self, options: AllocatorOptions | None = None, capacity_bytes: int | None = None) -> None:
        self.options = options or AllocatorOptions()
        self.events: list[dict[str, Any]] = []
        self._device = _RecordingDevice(capacity_bytes, self.events)
        self.allocator = CachingAllocator(capacity_bytes, self.options, total_bytes=TOTAL_BYTES, device=self._device)
        self.frames: dict[int, list[dict[str, Any]]] = {}

    def malloc(self, size: int, stream: int = 0, frames: Sequence[dict[str, Any]] = ()) -> Block | None:
        """Allocate; return None and record the failure if the device is full."""
        before = self.allocator.segments()
        awaited = [block for _, block in self.allocator._awaited]
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory:
            self._note_completed(awaited)
            self._note_segments(before, stream)
            free = (self._device.capacity_bytes or 0) - self._device.taken_bytes
            self._add("oom", free, size, stream, list(frames))
            return None
        self._note_completed(awaited)
        self._note_segments(before, stream)
        self._add("alloc", block.address, size, stream, list(frames))
        self.frames[block.address] = list(frames)
        return block

    def free(self, block: Block, frames: Sequence[dict[str, Any]] = ()) -> None:
        """Free a block; one that another stream uses is completed by `synchronize`."""
        entry = block.address, block.requested_bytes, block.pool.stream, list(frames)
        waits = bool(block.stream_uses)
        self._add("free_requested", *entry)
        if not waits:
            self._add("free_completed", *entry)
        self.allocator.free(block)

    def synchronize(self) -> None:
        """Complete the frees of blocks that other streams used."""
        awaited = [block for _, block in self.allocator._awaited]
        self.allocator.synchronize()
        self._note_completed(awaited)

    def _note_completed(self, awaited: Sequence[Block]) -> None:
        """Add the end of frees that waited before and do not wait now."""
        for block in awaited:
            if not block.waits:
                self._add("free_completed", block.address, block.requested_bytes, block.pool.stream, [])

    def empty_cache(self) -> None:
        """Return the cache."""
        self.synchronize()
        before = self.allocator.segments()
        self.allocator.empty_cache()
        self._note_segments(before, 0)

    def _note_segments(self, before: Sequence[SegmentView], stream: int) -> None:
        """Add the events of segments that appeared or vanished, in the order of the changes."""
        old, new = _ranges(before), _ranges(self.allocator.segments())
        made, returned = ("map", "unmap") if self.options.expandable_segments else ("alloc", "free")
        gone = _differences(old, new)
        come = _differences(new, old)
        for start, size, owner in gone:
            self._add(f"segment_{returned}", start, size, owner, [])
        for start, size, owner in come:
            self._add(f"segment_{made}", start, size, owner, [])
        assert sum(size for _, size, _ in come) - sum(size for _, size, _ in gone) == sum(self._device.changes)
        self._device.changes.clear()

    def _add(self, action: str, address: int, size: int, stream: int, frames: list[dict[str, Any]]) -> None:
        key = "device_free" if action == "oom" else "addr"
        time_us = 10 * len(self.events)
        event = {"action": action, key: address, "size": size, "stream": stream, "frames": frames, "time_us": time_us}
        self.events.append(event)

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """Return the snapshot, with the last events alone, as a ring buffer keeps them."""
        events = self.events if last is None else self.events[max(len(self.events) - last, 0) :]
        limit = self.options.max_split_size_bytes
        return {
            "segments": [self._segment(view) for view in self.allocator.segments()],
            "device_traces": [events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "expandable_segments": self.options.expandable_segments,
                "max_split_size": -1 if limit is None else limit,
            },
            "external_annotations": [],
        }

    def _segment(self, view: SegmentView) -> dict[str, Any]:
        return {
            "device": 0,
            "address": view.address,
            "total_size": view.size_bytes,
            "stream": view.stream,
            "segment_type": "small" if view.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self.options.expandable_segments,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": str(block.state).replace("awaiting_free", "pending_free"),
                    "frames": self.frames.get(block.address, []) if block.requested_bytes else [],
                }
                for block in view.blocks
            ],
        }


def _ranges(views: Sequence[SegmentView]) -> dict[int, tuple[int, int, int]]:
    """Return the 2 MiB units that are mapped, with the segment (or the unit, if it expands) and stream of each."""
    unit = 2 << 20
    return {
        address: (view.address, view.size_bytes, view.stream)
        for view in views
        for address in range(view.address, view.address + view.size_bytes, unit)
    }


def _differences(
    one: dict[int, tuple[int, int, int]], other: dict[int, tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return the contiguous ranges of one state that the other lacks: start, size, stream."""
    unit = 2 << 20
    runs: list[list[int]] = []
    for address in sorted(one.keys() - other.keys()):
        segment, _, stream = one[address]
        last = runs[-1] if runs else None
        if last and last[0] + last[1] == address and last[3] == segment:
            last[1] += unit
        else:
            runs.append([address, unit, stream, segment])
    return [(start, size, stream) for start, size, stream, _ in runs]


def random_history(recorded: RecordedAllocator, seed: int, operations: int, most_bytes: int = 40 << 20) -> None:
    """Allocate, free, use other streams and return the cache at random."""
    draw = random.Random(seed)
    live: list[Block] = []
    for _ in range(operations):
        choice = draw.random()
        if choice < 0.55 or not live:
            size = draw.choice([draw.randint(1, 4096), draw.randint(1, 1 << 20), draw.randint(1, most_bytes)])
            block = recorded.malloc(size, draw.choice([0, 0, 0, 7]))
            if block is not None:
                live.append(block)
        elif choice < 0.96:
            block = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.1:
                recorded.allocator.record_stream(block, 9)
            recorded.free(block)
        elif choice < 0.985:
            recorded.synchronize()
        else:
            recorded.empty_cache()
