"""Caching allocators in a chosen state, and views of their contents."""

from typing import Any

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.allocator.state import BlockState

GIB = 1 << 30

EXPANDABLE = AllocatorOptions(expandable_segments=True)
SPLIT_LIMIT = AllocatorOptions(max_split_size_bytes=20 * MIB)


def mib(size: float) -> int:
    return int(size * MIB)


def layout(allocator: CachingAllocator) -> list[list[tuple[float, bool]]]:
    """Return the segments from the oldest, which has the highest address: (MiB, live) of each block."""
    return [
        [(block.size_bytes / MIB, block.state is BlockState.ALLOCATED) for block in segment.blocks]
        for segment in reversed(allocator.segments())
    ]


def state(allocator: CachingAllocator) -> tuple[float, float, float]:
    """Check the allocator, and return requested, allocated and reserved MiB."""
    allocator.check()
    return allocator.requested_bytes / MIB, allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


def filled(*sizes: float, capacity: float | None = None, options: AllocatorOptions | None = None) -> Any:
    """Return an allocator with a block of each size in MiB, and the blocks."""
    allocator = CachingAllocator(None if capacity is None else mib(capacity), options)
    return allocator, [allocator.malloc(mib(size)) for size in sizes]
