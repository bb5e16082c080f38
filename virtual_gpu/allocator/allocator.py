"""PyTorch's CUDA caching allocator without CUDA: the same requests give the same blocks, segments and peaks.

Line numbers refer to c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.11. Each stream has pools of its own, all streams
share one capacity. Graph capture and private pools are not modelled.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vramcast.errors import UserError, check_count
from vramcast.virtual_gpu.allocator import expandable, restoring
from vramcast.virtual_gpu.allocator import state as inspection
from vramcast.virtual_gpu.allocator.blocks import Block, Device, Pool, SearchCount
from vramcast.virtual_gpu.allocator.options import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import (
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    SMALL_SIZE_BYTES,
    format_bytes,
    interval,
    round_to_division,
    round_up,
    segment_bytes,
)

MAIN_STREAM = 0


class OutOfMemory(Exception):  # noqa: N818 - an outcome, under the name that PyTorch's users know
    """The device is full, even after the allocator returned its cache. Carries the figures that PyTorch prints."""

    def __init__(self, tried_bytes: int, total_bytes: int, free_bytes: int, allocated_bytes: int, reserved_bytes: int):
        super().__init__(tried_bytes, total_bytes, free_bytes, allocated_bytes, reserved_bytes)
        self.tried_bytes = tried_bytes
        """Size of the segment that could not be allocated, which can exceed the request."""
        self.total_bytes = total_bytes
        self.free_bytes = free_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes

    def __str__(self) -> str:
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(self.tried_bytes)}. "
            f"GPU has a total capacity of {format_bytes(self.total_bytes)} "
            f"of which {format_bytes(self.free_bytes)} is free. "
            f"Of the allocated memory {format_bytes(self.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_bytes(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch but unallocated."
        )


class CachingAllocator:
    """An allocator that hands out blocks of cached segments, on a device of `capacity_bytes` (None: unbounded).

    The capacity is the memory that the device leaves to the allocator: its total without the CUDA context and other
    processes. `total_bytes` is the whole device and defaults to the capacity; only a memory fraction and error
    messages refer to it. `device` stands for another source of memory, with the same capacity.

    >>> allocator = CachingAllocator(capacity_bytes=2**30)
    >>> block = allocator.malloc(3 * 2**20)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (3145728, 20971520)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 20971520)

    Known limits: addresses are not simulated, so the driver never fails for fragmentation of its own. Private pools of
    CUDA graphs and `torch.cuda.MemPool` are not modelled. Calls come one after another; threads do not race.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        options: AllocatorOptions | None = None,
        *,
        total_bytes: int | None = None,
        device: Device | None = None,
    ) -> None:
        self.options = options or AllocatorOptions()
        self.requested_bytes = 0
        """Requested sizes of the blocks that are not free."""
        self.allocated_bytes = 0
        """Sizes of the blocks that callers hold."""
        self.peak_requested_bytes = 0
        self.peak_allocated_bytes = 0
        self.retries = 0
        """Number of times that the whole cache was returned because the device was full (num_alloc_retries)."""
        self.ooms = 0
        self._device = device or Device(capacity_bytes)
        self._total_bytes = _total(capacity_bytes, total_bytes, self.options)
        self._allowed_bytes = self._allowed()
        self._collects = self._allowed_bytes is not None and self.options.garbage_collection_threshold > 0
        self._searches = (SearchCount(), SearchCount())
        self._main = self._make_pools(MAIN_STREAM)
        self._pools = {MAIN_STREAM: self._main}
        """Small and large pool of each stream."""
        self._awaiting_bytes = 0
        """Blocks that were freed while another stream used them."""
        self._peak_awaiting_active_bytes = 0
        self._recorded_events = 0
        self._awaited: deque[tuple[int, Block]] = deque()
        """Freed blocks that other streams use, with the number of events recorded before the free."""

    def _make_pools(self, stream: int) -> tuple[Pool, Pool]:
        expands = self.options.expandable_segments
        small, large = self._searches
        return (
            Pool(True, SMALL_SEGMENT_BYTES if expands else 0, stream, small),
            Pool(False, self.options.large_segment_size_bytes if expands else 0, stream, large),
        )

    def _pools_of(self, stream: int) -> tuple[Pool, Pool]:
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = self._make_pools(stream)
        return pools

    def _allowed(self) -> int | None:
        """Return the limit of a memory fraction; like PyTorch, None for the whole device."""
        if self._total_bytes is None or self.options.memory_fraction == 1:
            return None
        return int(self.options.memory_fraction * self._total_bytes)

    @property
    def capacity_bytes(self) -> int | None:
        """Return the memory that this allocator may reserve, None if it is unbounded."""
        return self._device.capacity_bytes

    def set_capacity(self, capacity_bytes: int) -> None:
        """Change what the device has for this allocator: a library that is loaded later takes its part."""
        self._device.capacity_bytes = capacity_bytes

    def set_memory_fraction(self, fraction: float) -> None:
        """Allow a part of the device, as torch.cuda.set_per_process_memory_fraction() does."""
        self.options = replace(self.options, memory_fraction=fraction)
        self._allowed_bytes = self._allowed()
        self._collects = self._allowed_bytes is not None and self.options.garbage_collection_threshold > 0

    @property
    def active_bytes(self) -> int:
        """Return the size of the blocks that callers hold or other streams still use."""
        return self.allocated_bytes + self._awaiting_bytes

    @property
    def peak_active_bytes(self) -> int:
        """Return the peak of `active_bytes`."""
        return max(self.peak_allocated_bytes, self._peak_awaiting_active_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Return the memory taken from the device: blocks in use and the cache."""
        return self._device.taken_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the peak of `reserved_bytes`."""
        return self._device.peak_bytes

    @property
    def cuda_mallocs(self) -> int:
        """Return the number of successful requests to the device."""
        return self._device.calls

    def reset_peaks(self) -> None:
        """Set the peaks to the current values, as torch.cuda.reset_peak_memory_stats() does."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self._peak_awaiting_active_bytes = self.active_bytes
        self._device.peak_bytes = self._device.taken_bytes

    def malloc(self, size_bytes: int, stream: int = MAIN_STREAM) -> Block:
        """Allocate a block on a stream; a size of 0 takes no memory (1413-1490)."""
        if size_bytes <= 0:
            return self._null(size_bytes)
        size = self.round_size(size_bytes)
        pools = self._main if stream == MAIN_STREAM else self._pools_of(stream)
        pool = pools[size > SMALL_SIZE_BYTES]  # get_pool, 3060-3085
        block = self._best_fit(pool, size) or self._obtain(pool, size)
        if self._should_split(block, size):
            pool.insert(block.split(size))
        block.allocated = True
        block.requested_bytes = size_bytes
        self._count(block)
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache, merged with its free neighbours (2949-).

        A block that other streams use stays out of the cache until they have passed this point (1980-, insert_events).
        """
        if not block.allocated or block.waits:
            if block.size_bytes == 0:
                return
            raise ValueError(f"the block at {block.address:#x} is not allocated: it was freed before")
        self.allocated_bytes -= block.size_bytes
        if block.stream_uses:
            block.waits, block.stream_uses = True, None
            self._awaiting_bytes += block.size_bytes
            self._awaited.append((self._recorded_events, block))
            return
        block.allocated = False
        self.requested_bytes -= block.requested_bytes
        block.pool.merge_and_insert(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block (Tensor.record_stream); uses on its own stream are ignored."""
        if block.size_bytes == 0 or block.pool.stream == stream:
            return
        if not block.allocated or block.waits:
            raise ValueError(f"the block at {block.address:#x} is not allocated: no stream can use it")
        if block.stream_uses is None:
            block.stream_uses = set()
        block.stream_uses.add(stream)

    def record_event(self) -> int:
        """Return the number of a CUDA event that is recorded now, for `complete`."""
        self._recorded_events += 1
        return self._recorded_events

    def complete(self, event: int) -> None:
        """Note that all streams have passed an event and free the blocks that waited for it.

        PyTorch looks at its events at the next allocation (process_events); peaks are the same.
        """
        while self._awaited and self._awaited[0][0] < event:
            self._stop_waiting(self._awaited.popleft()[1])

    def synchronize(self) -> None:
        """Free all blocks that wait for streams (synchronize_and_free_events)."""
        while self._awaited:
            self._stop_waiting(self._awaited.popleft()[1])

    def finish(self, block: Block) -> None:
        """Free one block that waits for streams: its own events have completed."""
        self._awaited = deque(entry for entry in self._awaited if entry[1] is not block)
        self._stop_waiting(block)

    def restore(
        self, segments: Sequence[inspection.SegmentView], lowest: Mapping[tuple[int, bool], int] | None = None
    ) -> dict[int, Block]:
        """Take over the state of another allocator, before the first request; return its active blocks by address.

        `lowest` is an address that an expandable segment is known to reach down to, by stream and kind (True: small).
        """
        if self._pools.keys() != {MAIN_STREAM} or any(pool.segments for pool in self._main):
            raise ValueError("expected an allocator without segments")
        blocks: dict[int, Block] = {}
        for pool, views in restoring.by_pool(segments, self._pools_of):
            space_bytes = expandable.address_space_bytes(self._total_bytes, pool.page_bytes) if pool.page_bytes else 0
            floor = (lowest or {}).get((pool.stream, pool.small))
            restoring.add_segments(pool, views, space_bytes, floor, blocks)
        for block in blocks.values():
            self._device.take(block.size_bytes)
            self._restore_block(block)
        for pool in self._each_pool():
            self._device.take(sum(size for size, _, _ in pool.free))
        self.reset_peaks()
        return blocks

    def _restore_block(self, block: Block) -> None:
        self.requested_bytes += block.requested_bytes
        if block.waits:
            self._awaiting_bytes += block.size_bytes
            self._awaited.append((self._recorded_events, block))
        else:
            self.allocated_bytes += block.size_bytes

    def _stop_waiting(self, block: Block) -> None:
        self._awaiting_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        block.allocated = block.waits = False
        block.pool.merge_and_insert(block)

    def empty_cache(self) -> None:
        """Return all unsplit free segments, as torch.cuda.empty_cache() does (3428-)."""
        self.synchronize()
        for pool in self._each_pool():
            for _, _, block in tuple(pool.free):
                if pool.page_bytes:
                    expandable.unmap(pool, block, self._device)
                elif not block.is_split:
                    self._release(block)

    def _each_pool(self) -> Iterator[Pool]:
        for small, large in self._pools.values():
            yield large
            yield small

    def segments(self) -> list[inspection.SegmentView]:
        """Return each contiguous range of device memory with its blocks, by address."""
        return inspection.segments(tuple(self._each_pool()))

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent; for tests."""
        inspection.check(
            tuple(self._each_pool()),
            requested_bytes=self.requested_bytes,
            allocated_bytes=self.allocated_bytes,
            active_bytes=self.active_bytes,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=self.capacity_bytes,
        )

    def round_size(self, size_bytes: int) -> int:
        """Return the size that a request is rounded up to (2585-2597)."""
        divisions = self.options.roundup_power2_divisions
        if divisions:
            if isinstance(divisions, tuple):
                divisions = divisions[interval(size_bytes)]
            if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
                return round_to_division(size_bytes, divisions)
        return round_up(size_bytes, MIN_BLOCK_BYTES)

    def _null(self, size_bytes: int) -> Block:
        if size_bytes < 0:
            raise ValueError(f"expected a size from 0, found {size_bytes}")
        return Block(0, 0, self._main[0])

    def _count(self, block: Block) -> None:
        self.requested_bytes += block.requested_bytes
        self.allocated_bytes += block.size_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        if self._awaiting_bytes:
            self._peak_awaiting_active_bytes = max(self._peak_awaiting_active_bytes, self.active_bytes)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Take out the smallest sufficient free block, the lowest of equal ones (get_free_block, 3125-)."""
        if self._collects:
            pool.searches.value += 1
        index = self._fit(pool, size)
        return None if index is None else pool.free.pop(index)[2]

    def _fit(self, pool: Pool, size: int) -> int | None:
        """Return the place of the best fit in the free list."""
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        if pool.page_bytes:
            index = expandable.past_growing(pool, index)
        return None if self._is_oversize(pool.free[index][0], size) else index

    def _is_oversize(self, block_bytes: int, size: int) -> bool:
        """Return True if a block above the split limit must not serve a request of this size."""
        limit = self.options.max_split_size_bytes
        if limit is None:
            return False
        if size < limit:
            return block_bytes >= limit
        return block_bytes >= size + self.options.max_non_split_rounding_bytes

    def _should_split(self, block: Block, size: int) -> bool:
        """Return True if the remainder of a block becomes a block of its own (3095-3113)."""
        rest = block.size_bytes - size
        if block.pool.small or block.pool.page_bytes:
            return rest >= MIN_BLOCK_BYTES
        limit = self.options.max_split_size_bytes
        return rest > SMALL_SIZE_BYTES and (limit is None or size < limit)

    def _obtain(self, pool: Pool, size: int) -> Block:
        """Take memory from the device, and return more and more of the cache while it is full."""
        if self._collects:
            self._collect_garbage()
        block = self._take(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._take(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._take(pool, size)
        if block is None:
            self.ooms += 1
            raise self._out_of_memory(size)
        return block

    def _take(self, pool: Pool, size: int) -> Block | None:
        """Take a new segment or pages of the expandable one; return None if the device is full (alloc_block, 3278)."""
        new_bytes = segment_bytes(size, self.options.large_segment_size_bytes)
        if self._allowed_bytes is not None and self.reserved_bytes + new_bytes > self._allowed_bytes:
            return None
        if pool.page_bytes:
            return expandable.grow(pool, size, self._device, self._total_bytes)
        if not self._device.take(new_bytes):
            return None
        block = Block(self._device.address_space(new_bytes, SMALL_SEGMENT_BYTES), new_bytes, pool)
        pool.segments[block.address] = block
        self._device.note(False, block.address, new_bytes, pool)
        return block

    def _release(self, block: Block) -> None:
        """Return a free, unsplit segment to the device (release_block)."""
        block.pool.remove(block)
        del block.pool.segments[block.address]
        self._device.give_back(block.size_bytes)
        self._device.note(True, block.address, block.size_bytes, block.pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Return as few blocks above the split limit as necessary; return True if they suffice (3371-).

        PyTorch considers blocks of the stream that allocates alone.
        """
        limit = self.options.max_split_size_bytes
        if limit is None or pool.page_bytes:
            return False
        missing = max(size, limit)
        index = bisect_left(pool.free, (missing,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        while missing > 0 and pool.free and pool.free[-1][0] >= limit:
            missing -= pool.free[-1][0]
            self._release(pool.free[-1][2])
        return missing <= 0

    def _collect_garbage(self) -> None:
        """Return large segments of at least mean age until the threshold is met (3194-3256)."""
        threshold = int(self.options.garbage_collection_threshold * (self._allowed_bytes or 0))
        ages = {
            block: pool.searches.value - block.born
            for _, pool in self._pools.values()
            for _, _, block in pool.free
            if not (block.is_split or pool.page_bytes)
        }
        while ages and self.reserved_bytes > threshold:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                del ages[block]
                self._release(block)

    def _out_of_memory(self, size: int) -> OutOfMemory:
        total_bytes = self._total_bytes or 0
        capacity_bytes = total_bytes if self.capacity_bytes is None else self.capacity_bytes
        return OutOfMemory(
            tried_bytes=segment_bytes(size, self.options.large_segment_size_bytes),
            total_bytes=total_bytes,
            free_bytes=max(capacity_bytes - self.reserved_bytes, 0),
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
        )


def _total(capacity_bytes: int | None, total_bytes: int | None, options: AllocatorOptions) -> int | None:
    """Return the size of the device, after a check that it agrees with the capacity."""
    if capacity_bytes is not None:
        check_count("capacity_bytes", capacity_bytes, least=0)
    if total_bytes is None:
        total_bytes = capacity_bytes
    elif capacity_bytes is not None:
        check_count("total_bytes", total_bytes, least=capacity_bytes)
    if total_bytes is None and options.memory_fraction < 1:
        raise UserError("expected the size of the device with memory_fraction below 1, found none: set capacity_bytes")
    return total_bytes


__all__ = ["MAIN_STREAM", "AllocatorOptions", "Block", "CachingAllocator", "OutOfMemory"]
