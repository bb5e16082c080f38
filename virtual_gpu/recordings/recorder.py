"""Records a simulated allocator as torch does: https://pytorch.org/memory_viz and `vramcast snapshot` read the result.

The format is that of torch.cuda.memory._snapshot (torch/csrc/cuda/memory_snapshot.cpp).
"""

from collections.abc import Sequence
from typing import Any

from vramcast.virtual_gpu.allocator.allocator import Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.blocks import Device
from vramcast.virtual_gpu.allocator.options import AllocatorOptions
from vramcast.virtual_gpu.allocator.state import BlockState, SegmentView

Frames = list[dict[str, Any]]


class RecordedAllocator:
    """A caching allocator with its history."""

    def __init__(
        self, capacity_bytes: int | None = None, options: AllocatorOptions | None = None, total_bytes: int | None = None
    ) -> None:
        self.options = options or AllocatorOptions()
        self.events: list[dict[str, Any]] = []
        self.frames: dict[int, Frames] = {}
        """The stack of each block, by address."""
        self.time_us = 0
        self._device = Device(capacity_bytes)
        self._device.log = []
        self.allocator = CachingAllocator(capacity_bytes, self.options, total_bytes=total_bytes, device=self._device)
        self._awaited: list[Block] = []

    def malloc(self, size: int, stream: int = 0, frames: Frames | None = None) -> Block | None:
        """Allocate; return None and record the failure if the device is full."""
        frames = frames or []
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            self.note_device(frames)
            self._add("oom", error.free_bytes, size, stream, frames)
            return None
        self.note_device(frames)
        if block.size_bytes:
            self._add("alloc", block.address, size, stream, frames)
            self.frames[block.address] = frames
        return block

    def free(self, block: Block, frames: Frames | None = None) -> None:
        """Free a block; one that another stream uses is completed later."""
        if not block.size_bytes:
            return
        waits = bool(block.stream_uses)
        entry = block.address, block.requested_bytes, block.pool.stream, frames or []
        self._add("free_requested", *entry)
        if waits:
            self._awaited.append(block)
        else:
            self._add("free_completed", *entry)
        self.allocator.free(block)

    def empty_cache(self) -> None:
        """Return the cache, as torch.cuda.empty_cache() does."""
        self.allocator.empty_cache()
        self.note_device([])

    def note_device(self, frames: Frames) -> None:
        """Add frees that streams completed and segments that were made or returned since the last event."""
        for block in [item for item in self._awaited if not item.waits]:
            self._awaited.remove(block)
            self._add("free_completed", block.address, block.requested_bytes, block.pool.stream, [])
        changes = self._device.log or []
        for change in changes:
            made, returned = ("map", "unmap") if change.pages else ("alloc", "free")
            action = f"segment_{returned if change.returned else made}"
            self._add(action, change.address, change.size_bytes, change.stream, frames)
        changes.clear()

    def _add(self, action: str, address: int, size: int, stream: int, frames: Frames) -> None:
        self.events.append({
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "frames": frames,
            "time_us": self.time_us,
        })  # fmt: skip

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """Return the snapshot, with the last events alone if a number is given, as a ring buffer keeps them."""
        limit = self.options.max_split_size_bytes
        return {
            "segments": segments_of(self.allocator, self.frames),
            "device_traces": [self.events if last is None else self.events[max(len(self.events) - last, 0) :]],
            "allocator_settings": {
                "expandable_segments": self.options.expandable_segments,
                "max_split_size": -1 if limit is None else limit,
                "garbage_collection_threshold": self.options.garbage_collection_threshold,
            },
            "external_annotations": [],
        }


def segments_of(allocator: CachingAllocator, frames: dict[int, Frames]) -> list[dict[str, Any]]:
    """Return the segments of an allocator as torch.cuda.memory_snapshot does."""
    return [_segment(view, allocator.options, frames) for view in allocator.segments()]


def _segment(segment: SegmentView, options: AllocatorOptions, frames: dict[int, Frames]) -> dict[str, Any]:
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": _sum(segment, (BlockState.ALLOCATED,)),
        "active_size": _sum(segment, (BlockState.ALLOCATED, BlockState.AWAITING_FREE)),
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": options.expandable_segments,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes,
                "state": block.state.value,
                "frames": frames.get(block.address, []) if block.state is BlockState.ALLOCATED else [],
            }
            for block in segment.blocks
        ],
    }


def _sum(segment: SegmentView, states: Sequence[BlockState]) -> int:
    return sum(block.size_bytes for block in segment.blocks if block.state in states)
