"""Expandable segments: one growing segment per pool, whose pages are mapped when they are needed.

Line numbers refer to c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.11. Segments start at a multiple of the page size
of their pool, so page boundaries follow from addresses.
"""

from vramcast.virtual_gpu.allocator.blocks import Block, Device, Pool
from vramcast.virtual_gpu.allocator.sizes import round_up

UNLIMITED_ADDRESS_BYTES = 1 << 46
"""Address space of a segment on an unbounded device."""


def address_space_bytes(total_bytes: int | None, page_bytes: int) -> int:
    """Return the address space of one segment: the device's memory and an eighth for pages that move (385)."""
    if total_bytes is None:
        return round_up(UNLIMITED_ADDRESS_BYTES, page_bytes)
    return max(round_up(total_bytes + total_bytes // 8, page_bytes), page_bytes)


def past_growing(pool: Pool, index: int) -> int:
    """Return the index of the best fit from `index` on, where a growable block counts with its maximal size."""
    while index + 1 < len(pool.free) and _reach(pool.free[index + 1][2]) < _reach(pool.free[index][2]):
        index += 1
    return index


def _reach(block: Block) -> int:
    following = block.next
    if following is None or following.mapped:
        return block.size_bytes
    return block.size_bytes + following.size_bytes


def grow(pool: Pool, size_bytes: int, device: Device, total_bytes: int | None) -> Block | None:
    """Map pages until a block of a size is free and remove it from the pool; return None if the device is full.

    Pages that were mapped before the device turned out to be full stay mapped, as in PyTorch
    (try_allocate_expandable_block).
    """
    block: Block | None = _candidate(pool, size_bytes) or _new_segment(pool, device, total_bytes)
    if block is not None and not block.mapped:
        block = _map(pool, block, min(block.size_bytes, size_bytes), device)
    while block is not None and block.size_bytes < size_bytes:
        following = block.next
        if following is None:  # the request exceeds the address space, and therefore the device
            return None
        block = _map(pool, following, min(size_bytes - block.size_bytes, following.size_bytes), device)
    if block is not None:
        pool.remove(block)
    return block


def _candidate(pool: Pool, size_bytes: int) -> Block | None:
    """Return the lowest unmapped block with enough room from it, or from the free block before it (2799-2845)."""
    for _, block in pool.unmapped:
        before = block.previous
        first = before if before is not None and not before.allocated else block
        if _has_room(first, size_bytes):
            return first
    return None


def _has_room(first: Block, size_bytes: int) -> bool:
    block: Block | None = first
    while size_bytes > 0 and block is not None and not block.allocated:
        size_bytes -= block.size_bytes
        block = block.next
    return size_bytes <= 0


def _new_segment(pool: Pool, device: Device, total_bytes: int | None) -> Block:
    space_bytes = address_space_bytes(total_bytes, pool.page_bytes)
    block = Block(device.address_space(space_bytes, pool.page_bytes), space_bytes, pool, mapped=False)
    pool.segments[block.address] = block
    pool.insert(block)
    return block


def _map(pool: Pool, block: Block, size_bytes: int, device: Device) -> Block | None:
    """Map whole pages at the start of an unmapped block; return the mapped block, None if the device is full (399-)."""
    mapped_bytes = round_up(size_bytes, pool.page_bytes)
    if not device.take(mapped_bytes):
        return None
    device.note(False, block.address, mapped_bytes, pool)
    pool.remove(block)
    if mapped_bytes < block.size_bytes:
        pool.insert(block.split(mapped_bytes))
    block.mapped = True
    return pool.merge_and_insert(block)


def unmap(pool: Pool, block: Block, device: Device) -> None:
    """Unmap the whole pages of a free block; delete a segment without pages (unmap_block, 3536)."""
    first = round_up(block.address, pool.page_bytes)
    last = block.end // pool.page_bytes * pool.page_bytes
    if first >= last:
        return
    pool.remove(block)
    if last < block.end:
        pool.insert(block.split(last - block.address))
    if first > block.address:
        rest = block.split(first - block.address)
        pool.insert(block)
        block = rest
    block.mapped = False
    device.give_back(block.size_bytes)
    device.note(True, block.address, block.size_bytes, pool)
    block = pool.merge_and_insert(block)
    if not block.is_split:
        pool.remove(block)
        del pool.segments[block.address]
