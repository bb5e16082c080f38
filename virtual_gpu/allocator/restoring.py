"""Blocks and pools out of the recorded state of another allocator."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from vramcast.virtual_gpu.allocator.blocks import Block, Pool
from vramcast.virtual_gpu.allocator.sizes import round_up
from vramcast.virtual_gpu.allocator.state import BlockState, SegmentView


def by_pool(
    segments: Sequence[SegmentView], pools_of: Callable[[int], tuple[Pool, Pool]]
) -> Iterator[tuple[Pool, list[SegmentView]]]:
    """Yield each pool with its segments, by address."""
    groups: dict[tuple[int, bool], list[SegmentView]] = {}
    for segment in sorted(segments, key=lambda item: item.address):
        groups.setdefault((segment.stream, segment.small), []).append(segment)
    for (stream, small), views in groups.items():
        yield pools_of(stream)[0 if small else 1], views


def add_segments(
    pool: Pool, views: Sequence[SegmentView], space_bytes: int, floor: int | None, active: dict[int, Block]
) -> None:
    """Add segments to a pool, and their active blocks to `active`.

    Ranges within one address space of `space_bytes` are parts of one expandable segment; 0 for fixed segments. The
    space begins at `floor`, if that is below the ranges.
    """
    groups: list[list[SegmentView]] = []
    for view in views:
        if space_bytes and groups and view.address + view.size_bytes - groups[-1][0].address <= space_bytes:
            groups[-1].append(view)
        else:
            groups.append([view])
    for group in groups:
        blocks = [block for view in group for block in _blocks(pool, view, active)]
        if space_bytes:
            blocks = _with_unmapped(pool, blocks, space_bytes, floor)
        pool.segments[blocks[0].address] = blocks[0]
        for left, right in pairwise(blocks):
            left.next, right.previous = right, left
        for block in blocks:
            if not block.allocated:
                pool.insert(block)


def _blocks(pool: Pool, view: SegmentView, active: dict[int, Block]) -> Iterator[Block]:
    for item in view.blocks:
        block = Block(item.address, item.size_bytes, pool)
        if item.state is not BlockState.FREE:
            block.allocated = True
            block.waits = item.state is BlockState.AWAITING_FREE
            block.requested_bytes = item.requested_bytes
            active[item.address] = block
        yield block


def _with_unmapped(pool: Pool, blocks: Sequence[Block], space_bytes: int, floor: int | None) -> list[Block]:
    """Return the blocks of an expandable segment with the address space between and behind them."""
    first = blocks[0].address
    if floor is not None and first - space_bytes < floor < first:
        first = floor
    base = first // pool.page_bytes * pool.page_bytes
    whole: list[Block] = []
    place = base
    for block in blocks:
        if block.address > place:
            whole.append(Block(place, block.address - place, pool, mapped=False))
        whole.append(block)
        place = block.end
    end = round_up(base + space_bytes, pool.page_bytes)
    if end > place:
        whole.append(Block(place, end - place, pool, mapped=False))
    return whole
