"""Inspection of a caching allocator: a view of its segments, and a consistency check."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from vramcast.virtual_gpu.allocator.blocks import Block, Pool
from vramcast.virtual_gpu.allocator.sizes import MIN_BLOCK_BYTES, SMALL_SIZE_BYTES


class BlockState(StrEnum):
    """State of a block, in the terms of torch.cuda.memory_snapshot()."""

    ALLOCATED = "active_allocated"
    AWAITING_FREE = "active_awaiting_free"
    FREE = "inactive"


@dataclass(frozen=True)
class BlockView:
    """The current state of a block."""

    address: int
    size_bytes: int
    requested_bytes: int
    """0 if the block is free."""
    state: BlockState


@dataclass(frozen=True)
class SegmentView:
    """The current state of a contiguous range of device memory."""

    address: int
    size_bytes: int
    small: bool
    blocks: tuple[BlockView, ...]
    stream: int = 0


def segments(pools: Sequence[Pool]) -> list[SegmentView]:
    """Return each mapped range of each segment, by address."""
    views = []
    for pool in pools:
        for first in pool.segments.values():
            for mapped, blocks in groupby(_walk(first), key=lambda block: block.mapped):
                if mapped:
                    views.append(_segment_view(tuple(blocks), pool))
    return sorted(views, key=lambda segment: segment.address)


def _segment_view(blocks: tuple[Block, ...], pool: Pool) -> SegmentView:
    size_bytes = sum(block.size_bytes for block in blocks)
    views = tuple(_block_view(block) for block in blocks)
    return SegmentView(blocks[0].address, size_bytes, pool.small, views, pool.stream)


def _block_view(block: Block) -> BlockView:
    if not block.allocated:
        return BlockView(block.address, block.size_bytes, 0, BlockState.FREE)
    state = BlockState.AWAITING_FREE if block.waits else BlockState.ALLOCATED
    return BlockView(block.address, block.size_bytes, block.requested_bytes, state)


def _walk(first: Block) -> Iterator[Block]:
    block: Block | None = first
    while block is not None:
        yield block
        block = block.next


def check(
    pools: Sequence[Pool],
    *,
    requested_bytes: int,
    allocated_bytes: int,
    active_bytes: int,
    reserved_bytes: int,
    capacity_bytes: int | None,
) -> None:
    """Raise AssertionError unless blocks tile segments, free neighbours are merged, lists and sums agree."""
    blocks: list[Block] = []
    for pool in pools:
        of_pool = [block for first in pool.segments.values() for block in _check_segment(pool, first)]
        _check_lists(pool, of_pool)
        blocks += of_pool
    active = [block for block in blocks if block.allocated]
    _equal("allocated bytes", allocated_bytes, _sum(block for block in active if not block.waits))
    _equal("active bytes", active_bytes, _sum(active))
    _equal("requested bytes", requested_bytes, sum(block.requested_bytes for block in active))
    _equal("reserved bytes", reserved_bytes, _sum(block for block in blocks if block.mapped))
    _require(capacity_bytes is None or reserved_bytes <= capacity_bytes, "the reserved bytes exceed the capacity")


def _check_segment(pool: Pool, first: Block) -> list[Block]:
    blocks = list(_walk(first))
    _require(pool.segments.get(first.address) is first and first.previous is None, "a segment starts at another block")
    for left, right in pairwise(blocks):
        _require(right.previous is left and left.end == right.address, f"a gap behind {left.address:#x}")
        merged = left.allocated or right.allocated or left.mapped != right.mapped
        _require(merged, f"free neighbours at {left.address:#x} are not merged")
    for block in blocks:
        _check_block(pool, block)
    return blocks


def _check_block(pool: Pool, block: Block) -> None:
    where = f"the block at {block.address:#x}"
    _require(block.pool is pool, f"{where} belongs to another pool")
    _require(block.size_bytes > 0 and block.size_bytes % MIN_BLOCK_BYTES == 0, f"{where} has an odd size")
    if block.allocated:
        _require(block.mapped, f"{where} is allocated without memory")
        _require(0 < block.requested_bytes <= block.size_bytes, f"{where} is smaller than its request")
        _require(not pool.small or block.requested_bytes <= SMALL_SIZE_BYTES, f"{where} is too large for its pool")
    else:
        _require(not block.waits and not block.stream_uses, f"{where} is free but awaits a stream")
    if not block.mapped:
        aligned = block.address % pool.page_bytes == 0 == block.size_bytes % pool.page_bytes
        _require(aligned, f"{where} is not aligned to pages")


def _check_lists(pool: Pool, blocks: Sequence[Block]) -> None:
    free = sorted((block.size_bytes, block.address) for block in blocks if block.mapped and not block.allocated)
    unmapped = sorted(block.address for block in blocks if not block.mapped)
    _equal("the free list", [entry[:2] for entry in pool.free], free)
    _equal("the unmapped list", [entry[0] for entry in pool.unmapped], unmapped)
    listed = {entry[-1] for entry in (*pool.free, *pool.unmapped)}
    _require(listed == {block for block in blocks if not block.allocated}, "a list holds a block of no segment")


def _sum(blocks: Iterable[Block]) -> int:
    return sum(block.size_bytes for block in blocks)


def _equal(name: str, recorded: object, counted: object) -> None:
    _require(recorded == counted, f"{name}: recorded {recorded}, counted {counted}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
