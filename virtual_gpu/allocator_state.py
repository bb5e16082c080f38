"""Looking into a caching allocator: a picture of its segments, and a check that its books agree."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from vramcast.virtual_gpu.blocks import Block, Pool
from vramcast.virtual_gpu.sizes import MIN_BLOCK_BYTES, SMALL_SIZE_BYTES


class BlockState(StrEnum):
    """In the words of torch.cuda.memory_snapshot()."""

    ALLOCATED = "active_allocated"
    FREE = "inactive"


@dataclass(frozen=True)
class BlockView:
    """A block as it is now."""

    address: int
    size_bytes: int
    requested_bytes: int
    """0 if it is free."""
    state: BlockState


@dataclass(frozen=True)
class SegmentView:
    """Memory from the card in one piece, as it is now."""

    address: int
    size_bytes: int
    small: bool
    blocks: tuple[BlockView, ...]


def segments(pools: Sequence[Pool]) -> list[SegmentView]:
    """Each mapped stretch of each segment, by address."""
    found = []
    for pool in pools:
        for first in pool.segments.values():
            for mapped, blocks in groupby(_walk(first), key=lambda block: block.mapped):
                if mapped:
                    found.append(_segment_view(tuple(blocks), pool.small))
    return sorted(found, key=lambda segment: segment.address)


def _segment_view(blocks: tuple[Block, ...], small: bool) -> SegmentView:
    size_bytes = sum(block.size_bytes for block in blocks)
    return SegmentView(blocks[0].address, size_bytes, small, tuple(_block_view(block) for block in blocks))


def _block_view(block: Block) -> BlockView:
    if block.allocated:
        return BlockView(block.address, block.size_bytes, block.requested_bytes, BlockState.ALLOCATED)
    return BlockView(block.address, block.size_bytes, 0, BlockState.FREE)


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
    reserved_bytes: int,
    capacity_bytes: int | None,
) -> None:
    """Blocks tile their segments, free neighbours are merged, the pools hold the free blocks, sums agree."""
    blocks: list[Block] = []
    for pool in pools:
        of_pool = [block for first in pool.segments.values() for block in _check_segment(pool, first)]
        _check_lists(pool, of_pool)
        blocks += of_pool
    live = [block for block in blocks if block.allocated]
    _equal("allocated bytes", allocated_bytes, _sum(live))
    _equal("requested bytes", requested_bytes, sum(block.requested_bytes for block in live))
    _equal("reserved bytes", reserved_bytes, _sum(block for block in blocks if block.mapped))
    _require(capacity_bytes is None or reserved_bytes <= capacity_bytes, "more is reserved than the card has")


def _check_segment(pool: Pool, first: Block) -> list[Block]:
    blocks = list(_walk(first))
    _require(pool.segments.get(first.address) is first and first.previous is None, "a segment starts at another block")
    for left, right in pairwise(blocks):
        _require(right.previous is left and left.end == right.address, f"a gap behind {left.address:#x}")
        joined = left.allocated or right.allocated or left.mapped != right.mapped
        _require(joined, f"free neighbours at {left.address:#x} are not merged")
    for block in blocks:
        _check_block(pool, block)
    return blocks


def _check_block(pool: Pool, block: Block) -> None:
    where = f"the block at {block.address:#x}"
    _require(block.pool is pool, f"{where} is of another pool")
    _require(block.size_bytes > 0 and block.size_bytes % MIN_BLOCK_BYTES == 0, f"{where} has an odd size")
    if block.allocated:
        _require(block.mapped, f"{where} is handed out without memory")
        _require(0 < block.requested_bytes <= block.size_bytes, f"{where} is smaller than what was asked for")
        _require(not pool.small or block.requested_bytes <= SMALL_SIZE_BYTES, f"{where} is too large for its pool")
    if not block.mapped:
        _require(block.address % pool.page_bytes == 0 == block.size_bytes % pool.page_bytes, f"{where} is no pages")


def _check_lists(pool: Pool, blocks: Sequence[Block]) -> None:
    free = sorted((block.size_bytes, block.address) for block in blocks if block.mapped and not block.allocated)
    unmapped = sorted(block.address for block in blocks if not block.mapped)
    _equal("the free list", [entry[:2] for entry in pool.free], free)
    _equal("the unmapped list", [entry[0] for entry in pool.unmapped], unmapped)
    listed = {entry[-1] for entry in (*pool.free, *pool.unmapped)}
    _require(listed == {block for block in blocks if not block.allocated}, "a list holds a block that is none")


def _sum(blocks: Iterable[Block]) -> int:
    return sum(block.size_bytes for block in blocks)


def _equal(what: str, found: object, expected: object) -> None:
    _require(found == expected, f"{what}: the books say {found}, the blocks {expected}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
