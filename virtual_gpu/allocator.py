"""PyTorch's CUDA caching allocator, without CUDA: the same requests give the same blocks, segments and peaks.

Lines are those of c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.11. One stream, no graph capture, no private pools.
"""

from bisect import bisect_left

from vramcast.errors import UserError, check_count
from vramcast.virtual_gpu import allocator_state as inspection
from vramcast.virtual_gpu import expandable
from vramcast.virtual_gpu.allocator_options import AllocatorOptions
from vramcast.virtual_gpu.blocks import Block, Device, Pool
from vramcast.virtual_gpu.sizes import (
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    SMALL_SIZE_BYTES,
    format_bytes,
    interval,
    round_to_division,
    round_up,
    segment_bytes,
)


class OutOfMemory(Exception):  # noqa: N818 - an outcome, in the name that PyTorch's users know
    """The card is full, even with all of the cache returned that could be. Carries the figures that PyTorch prints."""

    def __init__(self, tried_bytes: int, total_bytes: int, free_bytes: int, allocated_bytes: int, reserved_bytes: int):
        super().__init__(tried_bytes, total_bytes, free_bytes, allocated_bytes, reserved_bytes)
        self.tried_bytes = tried_bytes
        """The segment that could not be had, which can be more than what was asked for."""
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
    """Hands out blocks of segments that it keeps, on a card of `capacity_bytes` (None: without end).

    The capacity is what the card leaves to the allocator: its total without the CUDA context and what others hold.
    `total_bytes` is the whole card, the capacity unless it is given; only a memory fraction and messages refer to it.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        options: AllocatorOptions | None = None,
        *,
        total_bytes: int | None = None,
    ) -> None:
        self.options = options or AllocatorOptions()
        self.requested_bytes = 0
        """What live blocks were asked for."""
        self.allocated_bytes = 0
        """What live blocks hold."""
        self.peak_requested_bytes = 0
        self.peak_allocated_bytes = 0
        self.retries = 0
        """How often the whole cache was returned because the card was full (num_alloc_retries)."""
        self.ooms = 0
        self._device = Device(capacity_bytes)
        self._total_bytes = _total(capacity_bytes, total_bytes, self.options)
        self._allowed_bytes = self._allowed()
        self._collects = self._allowed_bytes is not None and self.options.garbage_collection_threshold > 0
        expands = self.options.expandable_segments
        self._small = Pool(small=True, page_bytes=SMALL_SEGMENT_BYTES if expands else 0)
        self._large = Pool(small=False, page_bytes=self.options.large_segment_size_bytes if expands else 0)

    def _allowed(self) -> int | None:
        """Bytes that a memory fraction allows; like PyTorch, no limit at all for the whole card."""
        if self._total_bytes is None or self.options.memory_fraction == 1:
            return None
        return int(self.options.memory_fraction * self._total_bytes)

    @property
    def capacity_bytes(self) -> int | None:
        """What the card has for this allocator."""
        return self._device.capacity_bytes

    @property
    def active_bytes(self) -> int:
        """Blocks that are live or waited for by another stream: with one stream, what is allocated."""
        return self.allocated_bytes

    @property
    def peak_active_bytes(self) -> int:
        """Peak of `active_bytes`."""
        return self.peak_allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """What was taken from the card: live blocks and the cache."""
        return self._device.taken_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak of `reserved_bytes`."""
        return self._device.peak_bytes

    @property
    def cuda_mallocs(self) -> int:
        """How often the card was asked for memory and gave it."""
        return self._device.calls

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is held now, as torch.cuda.reset_peak_memory_stats() does."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self._device.peak_bytes = self._device.taken_bytes

    def malloc(self, size_bytes: int) -> Block:
        """A block for that many bytes; for 0 one that takes nothing (1413-1490)."""
        if size_bytes <= 0:
            return self._null(size_bytes)
        size = self.round_size(size_bytes)
        pool = self._small if size <= SMALL_SIZE_BYTES else self._large  # get_pool, 3060-3085
        block = self._best_fit(pool, size) or self._obtain(pool, size)
        if self._should_split(block, size):
            pool.insert(block.split(size))
        block.allocated = True
        block.requested_bytes = size_bytes
        self._count(block)
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache, merged with its free neighbours (2949-)."""
        if not block.allocated:
            if block.size_bytes == 0:
                return
            raise ValueError(f"the block at {block.address:#x} is not allocated: it was freed before")
        block.allocated = False
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size_bytes
        block.pool.merge_and_insert(block)

    def empty_cache(self) -> None:
        """Return all segments that are whole and free, as torch.cuda.empty_cache() does (3428-)."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if pool.page_bytes:
                    expandable.unmap(pool, block, self._device)
                elif not block.is_split:
                    self._release(block)

    def segments(self) -> list[inspection.SegmentView]:
        """Each contiguous stretch of memory that was taken from the card, with its blocks, by address."""
        return inspection.segments((self._small, self._large))

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself; for tests."""
        inspection.check(
            (self._small, self._large),
            requested_bytes=self.requested_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=self.capacity_bytes,
        )

    def round_size(self, size_bytes: int) -> int:
        """What a request is rounded to (2585-2597)."""
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
        return Block(0, 0, self._small)

    def _count(self, block: Block) -> None:
        self.requested_bytes += block.requested_bytes
        self.allocated_bytes += block.size_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough, the lowest of equals (get_free_block, 3125-)."""
        if self._collects:
            pool.searches += 1
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        if pool.page_bytes:
            index = expandable.past_growing(pool, index)
        if self._is_oversize(pool.free[index][0], size):
            return None
        return pool.free.pop(index)[2]

    def _is_oversize(self, found: int, size: int) -> bool:
        """Blocks above the split limit are for requests above it, and of about their size."""
        limit = self.options.max_split_size_bytes
        if limit is None:
            return False
        if size < limit:
            return found >= limit
        return found >= size + self.options.max_non_split_rounding_bytes

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether the rest of a block is worth keeping (3095-3113)."""
        rest = block.size_bytes - size
        if block.pool.small or block.pool.page_bytes:
            return rest >= MIN_BLOCK_BYTES
        limit = self.options.max_split_size_bytes
        return rest > SMALL_SIZE_BYTES and (limit is None or size < limit)

    def _obtain(self, pool: Pool, size: int) -> Block:
        """Memory from the card, returning ever more of the cache until there is enough."""
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
        """A new segment, or pages of the expandable one; None if the card is full (alloc_block, 3278)."""
        bought = segment_bytes(size, self.options.large_segment_size_bytes)
        if self._allowed_bytes is not None and self.reserved_bytes + bought > self._allowed_bytes:
            return None
        if pool.page_bytes:
            return expandable.grow(pool, size, self._device, self._total_bytes)
        if not self._device.take(bought):
            return None
        block = Block(self._device.address_space(bought, SMALL_SEGMENT_BYTES), bought, pool)
        pool.segments[block.address] = block
        return block

    def _release(self, block: Block) -> None:
        """Return a whole free segment to the card (release_block)."""
        block.pool.remove(block)
        del block.pool.segments[block.address]
        self._device.give_back(block.size_bytes)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Return as few blocks above the split limit as make room; whether they do (3371-)."""
        limit = self.options.max_split_size_bytes
        if limit is None or pool.page_bytes:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        while wanted > 0 and pool.free and pool.free[-1][0] >= limit:
            wanted -= pool.free[-1][0]
            self._release(pool.free[-1][2])
        return wanted <= 0

    def _collect_garbage(self) -> None:
        """Return large segments of at least mean age until few enough are held (3194-3256)."""
        threshold = int(self.options.garbage_collection_threshold * (self._allowed_bytes or 0))
        whole = [block for _, _, block in self._large.free if not (block.is_split or self._large.page_bytes)]
        ages = {block: self._large.searches - block.born for block in whole}
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
    """The size of the card, after checking that it can be what it is said to be."""
    if capacity_bytes is not None:
        check_count("capacity_bytes", capacity_bytes, least=0)
    if total_bytes is None:
        total_bytes = capacity_bytes
    elif capacity_bytes is not None:
        check_count("total_bytes", total_bytes, least=capacity_bytes)
    if total_bytes is None and options.memory_fraction < 1:
        raise UserError("expected the card's size where memory_fraction is below 1, found none: give capacity_bytes")
    return total_bytes


__all__ = ["AllocatorOptions", "Block", "CachingAllocator", "OutOfMemory"]
