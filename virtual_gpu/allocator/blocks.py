"""Data structures of the caching allocator: device memory, segments cut into blocks, and pools of free blocks."""

from bisect import bisect_left, insort
from typing import NamedTuple, Self

_TOP_ADDRESS = 1 << 47  # user address space on x86-64, which CUDA shares


class Block:
    """A part of a segment, and the handle that a caller holds while it is allocated.

    The left part of a split keeps its identity, and so does the left of two blocks that merge. Therefore the first
    block of a segment is one object for the lifetime of the segment.
    """

    __slots__ = (
        "address", "allocated", "born", "mapped", "next", "pool", "previous", "requested_bytes", "size_bytes",
        "stream_uses", "waits",
    )  # fmt: skip

    def __init__(self, address: int, size_bytes: int, pool: "Pool", mapped: bool = True) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.mapped = mapped
        """False for address space of an expandable segment without physical memory."""
        self.allocated = False
        """True while the block is not free: held by a caller, or freed but still awaited by other streams."""
        self.requested_bytes = 0
        self.born = 0
        """Search count of the pool when the block was last freed: its age for garbage collection."""
        self.previous: Block | None = None
        self.next: Block | None = None
        self.stream_uses: set[int] | None = None
        """Other streams that use the block (`record_stream`)."""
        self.waits = False
        """True if the block was freed and other streams must finish before it returns to its pool."""

    @property
    def end(self) -> int:
        """Return the address behind the block."""
        return self.address + self.size_bytes

    @property
    def is_split(self) -> bool:
        """Return True if the block is smaller than its segment."""
        return self.previous is not None or self.next is not None

    def split(self, size_bytes: int) -> Self:
        """Shrink to a size and return the remainder as a new block."""
        rest = type(self)(self.address + size_bytes, self.size_bytes - size_bytes, self.pool, self.mapped)
        self.size_bytes = size_bytes
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        return rest

    def absorb_next(self) -> None:
        """Merge with the block to the right, which ceases to exist."""
        absorbed = self.next
        if absorbed is None:
            raise ValueError("the last block of a segment has nothing to absorb")
        self.size_bytes += absorbed.size_bytes
        self.next = absorbed.next
        if self.next is not None:
            self.next.previous = self


class SearchCount:
    """Number of searches in the small or in the large pools of all streams (get_free_blocks_call_count)."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Pool:
    """Free blocks of one stream, small or large, in best-fit order."""

    def __init__(self, small: bool, page_bytes: int, stream: int = 0, searches: SearchCount | None = None) -> None:
        self.small = small
        self.stream = stream
        self.page_bytes = page_bytes
        """Page size of expandable segments; 0 for segments of a fixed size."""
        self.free: list[tuple[int, int, Block]] = []
        """(size, address, block), sorted: CUDACachingAllocator.cpp 867-875, for one stream."""
        self.unmapped: list[tuple[int, Block]] = []
        """(address, block), sorted."""
        self.segments: dict[int, Block] = {}
        """The first block of each segment, by address."""
        self.searches = searches or SearchCount()

    def insert(self, block: Block) -> None:
        """Add a block to the free list, or to the unmapped list if it has no memory."""
        if block.mapped:
            block.born = self.searches.value
            insort(self.free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block from the list that `insert` added it to."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge_and_insert(self, block: Block) -> Block:
        """Insert a block, merged with its free neighbours (try_merge_blocks, 3027-3058); return the merged block."""
        left = block.previous
        if left is not None and not left.allocated and left.mapped == block.mapped:
            self.remove(left)
            left.absorb_next()
            block = left
        right = block.next
        if right is not None and not right.allocated and right.mapped == block.mapped:
            self.remove(right)
            block.absorb_next()
        self.insert(block)
        return block


class DeviceChange(NamedTuple):
    """A segment, or pages of an expandable one, that was taken from the device or returned."""

    returned: bool
    address: int
    size_bytes: int
    stream: int
    pages: bool


class Device:
    """The memory of a device that the allocator may take."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self.peak_bytes = 0
        self.calls = 0
        """Number of successful cudaMalloc calls, or mappings of pages."""
        self.log: list[DeviceChange] | None = None
        """Segments that were taken and returned, for a recorder; None where nobody reads them."""
        self._lowest_address = _TOP_ADDRESS

    def note(self, returned: bool, address: int, size_bytes: int, pool: Pool) -> None:
        """Add a segment, or pages of one, to the log."""
        if self.log is not None:
            self.log.append(DeviceChange(returned, address, size_bytes, pool.stream, pool.page_bytes > 0))

    def take(self, size_bytes: int) -> bool:
        """Take memory, or return False if the device is full."""
        taken_bytes = self.taken_bytes + size_bytes
        if self.capacity_bytes is not None and taken_bytes > self.capacity_bytes:
            return False
        self.taken_bytes = taken_bytes
        self.peak_bytes = max(self.peak_bytes, taken_bytes)
        self.calls += 1
        return True

    def give_back(self, size_bytes: int) -> None:
        """Return memory to the device."""
        self.taken_bytes -= size_bytes

    def address_space(self, size_bytes: int, alignment_bytes: int) -> int:
        """Return the start of a new address range. Addresses fall, as those of cudaMalloc do.

        The direction is not documented. Among free blocks of one size the allocator takes the lowest address, and
        measured runs show that this is the youngest block (tests/test_measured_transformers.py).
        """
        self._lowest_address = (self._lowest_address - size_bytes) // alignment_bytes * alignment_bytes
        return self._lowest_address
