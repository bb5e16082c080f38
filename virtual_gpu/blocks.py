"""What the caching allocator keeps: the card's memory, segments cut into blocks, and pools of free blocks."""

from bisect import bisect_left, insort
from typing import Self

_TOP_ADDRESS = 1 << 47  # of a process on x86-64, whose addresses CUDA shares


class Block:
    """A stretch of a segment, and the handle that a caller holds while it is allocated.

    The left part of a split keeps its identity, as does the left of two blocks that merge: so the first block of a
    segment is one object for as long as the segment lives.
    """

    __slots__ = ("address", "allocated", "born", "mapped", "next", "pool", "previous", "requested_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: "Pool", mapped: bool = True) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.mapped = mapped
        """False for address space of an expandable segment that has no memory behind it."""
        self.allocated = False
        self.requested_bytes = 0
        self.born = 0
        """The pool's count of searches when the block was last freed: its age, for garbage collection."""
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def end(self) -> int:
        """The address behind the block."""
        return self.address + self.size_bytes

    @property
    def is_split(self) -> bool:
        """Whether the block is less than its segment."""
        return self.previous is not None or self.next is not None

    def split(self, size_bytes: int) -> Self:
        """Shrink to that size and return the rest as a block of its own."""
        rest = type(self)(self.address + size_bytes, self.size_bytes - size_bytes, self.pool, self.mapped)
        self.size_bytes = size_bytes
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        return rest

    def absorb_next(self) -> None:
        """Take over the block to the right, which is no block any more."""
        absorbed = self.next
        if absorbed is None:
            raise ValueError("the last block of a segment has nothing to absorb")
        self.size_bytes += absorbed.size_bytes
        self.next = absorbed.next
        if self.next is not None:
            self.next.previous = self


class Pool:
    """Free blocks of the small or of the large pool, best fit first."""

    def __init__(self, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        """Pages of expandable segments; 0 where segments have a fixed size."""
        self.free: list[tuple[int, int, Block]] = []
        """(size, address, block), sorted: CUDACachingAllocator.cpp 867-875, with one stream."""
        self.unmapped: list[tuple[int, Block]] = []
        """(address, block), sorted."""
        self.segments: dict[int, Block] = {}
        """The first block of each segment, by address."""
        self.searches = 0

    def insert(self, block: Block) -> None:
        """Put a block among the free ones, or among the unmapped if it has no memory."""
        if block.mapped:
            block.born = self.searches
            insort(self.free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out of where `insert` put it."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge_and_insert(self, block: Block) -> Block:
        """Insert a block, merged with its free neighbours (try_merge_blocks, 3027-3058); return what it became."""
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


class Device:
    """The memory of a card, as far as the allocator may have it."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self.peak_bytes = 0
        self.calls = 0
        """How often memory was taken: cudaMalloc, or a mapping of pages."""
        self._lowest_address = _TOP_ADDRESS

    def take(self, size_bytes: int) -> bool:
        """Take memory if there is so much."""
        taken_bytes = self.taken_bytes + size_bytes
        if self.capacity_bytes is not None and taken_bytes > self.capacity_bytes:
            return False
        self.taken_bytes = taken_bytes
        self.peak_bytes = max(self.peak_bytes, taken_bytes)
        self.calls += 1
        return True

    def give_back(self, size_bytes: int) -> None:
        """Return memory."""
        self.taken_bytes -= size_bytes

    def address_space(self, size_bytes: int, alignment_bytes: int) -> int:
        """Addresses that were never used before, falling as cudaMalloc's do.

        No document says so; among free blocks of one size the allocator takes the lowest, and measured runs show that
        this is the youngest (tests/test_measured_transformers.py).
        """
        self._lowest_address = (self._lowest_address - size_bytes) // alignment_bytes * alignment_bytes
        return self._lowest_address
