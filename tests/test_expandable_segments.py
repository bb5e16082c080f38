"""The caching allocator with expandable segments, worked out by hand."""

import pytest
from caching_allocators import EXPANDABLE, GIB, filled, layout, mib, state

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import MIB


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator, _ = filled(5, options=EXPANDABLE)
    assert layout(allocator) == [[(5, True), (15, False)]]
    allocator.malloc(mib(20))
    assert layout(allocator) == [[(5, True), (20, True), (15, False)]]
    allocator.malloc(1000)
    assert state(allocator)[2] == 42
    allocator.malloc(mib(1000))
    assert layout(allocator)[0] == [(5, True), (20, True), (1000, True), (15, False)]
    assert len(allocator.segments()) == 2


def test_expandable_segments_waste_no_rest() -> None:
    allocator, _ = filled(11, 8.9, options=EXPANDABLE)
    assert state(allocator)[1] == pytest.approx(19.9, abs=0.001)
    assert state(allocator)[2] == 20


def test_a_freed_expandable_segment_is_used_again() -> None:
    allocator, blocks = filled(5, 30, 50, options=EXPANDABLE)
    for block in blocks:
        allocator.free(block)
    assert layout(allocator) == [[(100, False)]]
    allocator.malloc(mib(100))
    assert (state(allocator), allocator.cuda_mallocs) == ((100, 100, 100), 3)


def test_a_hole_is_a_better_fit_than_the_end_that_can_grow() -> None:
    allocator, (_, hole, _) = filled(10, 12, 10, options=EXPANDABLE)
    allocator.free(hole)
    assert layout(allocator) == [[(10, True), (12, False), (10, True), (8, False)]]
    assert allocator.malloc(mib(6)).address == hole.address
    allocator.malloc(mib(7))
    assert layout(allocator) == [[(10, True), (6, True), (6, False), (10, True), (7, True), (1, False)]]


def test_empty_cache_unmaps_whole_pages_only_and_they_are_mapped_again() -> None:
    allocator, (first, middle, last) = filled(5, 40, 5, options=EXPANDABLE)
    allocator.free(middle)
    allocator.empty_cache()
    assert layout(allocator) == [[(5, False), (5, True), (10, False)], [(5, True), (15, False)]]
    assert state(allocator) == (10, 10, 40)
    allocator.malloc(mib(16))  # no free block holds it: the lowest gap is mapped, and merged on both sides
    assert layout(allocator) == [[(5, True), (16, True), (24, False), (5, True), (10, False)]]
    assert state(allocator) == (26, 26, 60)
    allocator.free(first)
    allocator.free(last)
    assert state(allocator) == (16, 16, 60)


def test_an_expandable_segment_without_pages_is_gone() -> None:
    allocator, blocks = filled(5, 0.5, 40, options=EXPANDABLE)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert (layout(allocator), state(allocator)) == ([], (0, 0, 0))
    assert allocator.malloc(mib(5)).address < min(block.address for block in blocks)  # of another segment


def test_of_equal_holes_the_lowest_is_taken() -> None:
    allocator, blocks = filled(6, 5, 6, 5, options=EXPANDABLE)
    allocator.free(blocks[2])
    allocator.free(blocks[0])
    assert allocator.malloc(mib(6)).address == blocks[0].address


def test_the_retry_unmaps_pages_and_maps_them_elsewhere() -> None:
    allocator = CachingAllocator(mib(80), EXPANDABLE, total_bytes=GIB)
    blocks = [allocator.malloc(mib(20)) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.malloc(mib(40))
    assert layout(allocator) == [[(20, True), (40, True)], [(20, True)]]
    assert (state(allocator), allocator.retries) == ((80, 80, 80), 1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(mib(2))
    assert allocator.retries == 2


def test_pages_go_from_one_pool_to_the_other() -> None:
    allocator, (small,) = filled(0.5, capacity=21, options=EXPANDABLE)
    allocator.free(small)
    allocator.malloc(mib(5))
    assert (layout(allocator), allocator.retries) == ([[(5, True), (15, False)]], 1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(1)


def test_more_than_the_address_space_is_out_of_memory() -> None:
    for capacity in (None, 1 << 40):
        allocator = CachingAllocator(capacity, EXPANDABLE)
        with pytest.raises(OutOfMemory):
            allocator.malloc(1 << 60)
        allocator.check()


def test_a_card_of_no_size_is_always_full() -> None:
    for options in (AllocatorOptions(), EXPANDABLE):
        allocator = CachingAllocator(0, options)
        for size in (1, 1, 5 * MIB):
            with pytest.raises(OutOfMemory):
                allocator.malloc(size)
        assert (state(allocator), allocator.ooms) == ((0, 0, 0), 3)


def test_address_space_ends_an_eighth_above_the_card() -> None:
    allocator, blocks = filled(*[20] * 8, capacity=160, options=EXPANDABLE)  # room for 180
    for block in blocks[::2]:
        allocator.free(block)
    allocator.empty_cache()
    allocator.malloc(mib(40))  # there is memory for it, but 20 MiB of addresses at the end
    assert state(allocator) == (120, 120, 120)
    assert len({segment.address // (180 * MIB) for segment in allocator.segments()}) == 2
