"""The caching allocator: sequences worked out by hand from PyTorch's rules, and laws that hold for any sequence."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.errors import UserError
from dataset_builder.measure.virtual.allocator import AllocatorOptions, Block, CachingAllocator, OutOfMemory
from dataset_builder.measure.virtual.inspection import BlockState
from dataset_builder.schema import MIB

GIB = 1 << 30

EXPANDABLE = AllocatorOptions(expandable_segments=True)
SPLIT_LIMIT = AllocatorOptions(max_split_size_bytes=20 * MIB)


def mib(size: float) -> int:
    return int(size * MIB)


def layout(allocator: CachingAllocator) -> list[list[tuple[float, bool]]]:
    """Segments from the oldest, whose address is the highest: the size in MiB of each block, and whether it is live."""
    return [
        [(block.size_bytes / MIB, block.state is BlockState.ALLOCATED) for block in segment.blocks]
        for segment in reversed(allocator.segments())
    ]


def state(allocator: CachingAllocator) -> tuple[float, float, float]:
    """Requested, allocated and reserved MiB, after a check."""
    allocator.check()
    return allocator.requested_bytes / MIB, allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


def filled(*sizes: float, capacity: float | None = None, options: AllocatorOptions | None = None) -> Any:
    """An allocator with a block of each size in MiB, and the blocks."""
    allocator = CachingAllocator(None if capacity is None else mib(capacity), options)
    return allocator, [allocator.malloc(mib(size)) for size in sizes]


# sizes, pools and segments


@pytest.mark.parametrize(
    ("size_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (511, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB - 511, MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (mib(9.9), 10381312, 20 * MIB),  # 9.9 MiB is 20275.2 times 512
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded first
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # the rest is above 1 MiB and split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB - 511, 12 * MIB, 12 * MIB),  # the rest is 1 MiB and stays with the block
        (11 * MIB, 12 * MIB, 12 * MIB),
        (12 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
        (GIB + 1, GIB + 512, GIB + 2 * MIB),
    ],
)
def test_one_request_takes_a_block_of_a_segment(size_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(size_bytes)
    allocator.check()
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (size_bytes, allocated_bytes)
    assert (allocator.reserved_bytes, allocator.cuda_mallocs) == (reserved_bytes, 1)
    assert allocator.active_bytes == allocator.peak_active_bytes == allocated_bytes


def test_nothing_takes_nothing() -> None:
    allocator = CachingAllocator()
    null = allocator.malloc(0)
    assert (null.address, null.size_bytes, state(allocator)) == (0, 0, (0, 0, 0))
    allocator.free(null)
    assert allocator.cuda_mallocs == 0
    with pytest.raises(ValueError, match="from 0, found -1"):
        allocator.malloc(-1)


def test_small_segments_are_split_down_to_512_bytes() -> None:
    allocator, _ = filled(1)
    allocator.malloc(MIB - 512)
    assert layout(allocator) == [[(1, True), (1 - 1 / 2048, True), (1 / 2048, False)]]
    allocator.malloc(3)
    assert layout(allocator) == [[(1, True), (1 - 1 / 2048, True), (1 / 2048, True)]]
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_pools_do_not_mix() -> None:
    allocator, (large,) = filled(5)
    allocator.free(large)
    allocator.malloc(MIB)
    assert layout(allocator) == [[(20, False)], [(1, True), (1, False)]]
    assert [segment.small for segment in allocator.segments()] == [True, False]


def test_requests_below_10_mib_share_a_segment() -> None:
    allocator, _ = filled(5, 9, 4, 7)
    assert layout(allocator) == [[(5, True), (9, True), (4, True), (2, False)], [(7, True), (13, False)]]


def test_a_large_rest_of_1_mib_is_not_split_off() -> None:
    allocator, (first, _) = filled(5, 5)
    allocator.free(first)
    allocator.malloc(4 * MIB)
    assert layout(allocator) == [[(5, True), (5, True), (10, False)]]
    assert state(allocator) == (9, 10, 20)


def test_a_large_rest_above_1_mib_is_split_off() -> None:
    allocator, (first, _) = filled(5, 5)
    allocator.free(first)
    allocator.malloc(4 * MIB - 512)
    assert layout(allocator) == [[(4 - 1 / 2048, True), (1 + 1 / 2048, False), (5, True), (10, False)]]


# best fit, reuse, merging


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals() -> None:
    allocator, blocks = filled(12, 30, 16, 16)
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(mib(14)).address == blocks[3].address
    assert layout(allocator) == [[(12, False)], [(30, False)], [(16, False)], [(14, True), (2, False)]]
    allocator.malloc(mib(16.5))
    assert layout(allocator)[1] == [(16.5, True), (13.5, False)]
    allocator.malloc(mib(1.5))
    assert layout(allocator)[3] == [(14, True), (2, True)]
    assert allocator.cuda_mallocs == 4


def test_a_cached_block_is_used_again() -> None:
    allocator, (first,) = filled(100)
    allocator.free(first)
    assert state(allocator) == (0, 0, 100)
    assert allocator.malloc(mib(100)).address == first.address
    assert (state(allocator), allocator.cuda_mallocs) == ((100, 100, 100), 1)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1], [(10, False), (5, True), (5, True)]),  # into the left one
        ([1, 0], [(10, False), (5, True), (5, True)]),  # into the right one
        ([0, 2, 1], [(15, False), (5, True)]),  # into both
        ([0, 2], [(5, False), (5, True), (5, False), (5, True)]),  # neighbours are live
        ([3, 2, 0, 1], [(20, False)]),
    ],
)
def test_freed_blocks_merge_with_free_neighbours(order: list[int], expected: list[tuple[float, bool]]) -> None:
    allocator, blocks = filled(5, 5, 5, 5)
    for index in order:
        allocator.free(blocks[index])
        allocator.check()
    assert layout(allocator) == [expected]


def test_blocks_of_two_segments_do_not_merge() -> None:
    allocator, blocks = filled(20, 20)
    for block in blocks:
        allocator.free(block)
    assert layout(allocator) == [[(20, False)], [(20, False)]]


def test_a_block_is_freed_once() -> None:
    allocator, (first, second) = filled(5, 5)
    allocator.free(second)
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(second)
    allocator.free(first)
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(first)
    assert state(allocator) == (0, 0, 20)


# returning memory


def test_empty_cache_returns_whole_segments_only() -> None:
    allocator, (first, second, small, _) = filled(5, 30, 0.5, 5)
    for block in (first, second, small):
        allocator.free(block)
    allocator.empty_cache()
    assert layout(allocator) == [[(5, False), (5, True), (10, False)]]
    assert (state(allocator), allocator.retries) == ((5, 5, 20), 0)


def test_peaks_stay_until_they_are_reset() -> None:
    allocator, (first,) = filled(11)
    allocator.free(first)
    allocator.empty_cache()
    peaks = (allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
    assert peaks == (mib(11), mib(12), mib(12))
    allocator.malloc(1)
    allocator.reset_peaks()
    peaks = (allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
    assert peaks == (1, 512, mib(2))


def test_a_full_card_is_out_of_memory() -> None:
    allocator, _ = filled(30, capacity=40)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(5))
    assert caught.value.tried_bytes == mib(20)  # the segment, not the request
    assert (caught.value.total_bytes, caught.value.free_bytes) == (mib(40), mib(10))
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (mib(30), mib(30))
    assert (state(allocator), allocator.retries, allocator.ooms) == ((30, 30, 30), 1, 1)
    allocator.malloc(mib(10))  # fits to the byte
    assert state(allocator) == (40, 40, 40)


def test_the_message_is_pytorchs() -> None:
    error = OutOfMemory(1024, 40 * GIB, 1536, 39 * GIB, 40 * GIB)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 1024 bytes. GPU has a total capacity of 40.00 GiB of which 1.50 KiB is "
        "free. Of the allocated memory 39.00 GiB is allocated by PyTorch, and 1024.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_full_card_gets_the_cache_back_and_tries_again() -> None:
    allocator, (first, second) = filled(20, 20, capacity=60)
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(mib(5))  # splits the first segment
    allocator.malloc(mib(40))
    assert layout(allocator) == [[(5, True), (15, False)], [(40, True)]]
    assert (state(allocator), allocator.retries, allocator.cuda_mallocs) == ((45, 45, 60), 1, 3)
    assert allocator.peak_reserved_bytes == mib(60)


def test_the_retry_returns_the_small_pool_too() -> None:
    allocator, (small,) = filled(0.5, capacity=12)
    allocator.free(small)
    allocator.malloc(mib(12))
    assert (state(allocator), allocator.retries) == ((12, 12, 12), 1)


def test_a_split_segment_stays_reserved_and_can_cause_the_oom() -> None:
    allocator, (first, _) = filled(15, 1.5, capacity=40)
    allocator.free(first)
    assert layout(allocator) == [[(16, False)], [(1.5, True), (18.5, False)]]
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(22))
    assert caught.value.free_bytes == mib(20)  # the 16 MiB went back, the 18.5 MiB could not
    assert layout(allocator) == [[(1.5, True), (18.5, False)]]


def test_the_cache_is_searched_before_the_card() -> None:
    allocator, (first,) = filled(40, capacity=40)
    allocator.free(first)
    allocator.malloc(mib(22))
    allocator.malloc(mib(18))
    assert (state(allocator), allocator.retries) == ((40, 40, 40), 0)


# options


def test_below_the_split_limit_no_block_above_it_is_taken() -> None:
    allocator, (first,) = filled(40, options=SPLIT_LIMIT)
    allocator.free(first)
    allocator.malloc(mib(12))
    assert layout(allocator) == [[(40, False)], [(12, True)]]
    allocator, (first,) = filled(20, options=SPLIT_LIMIT)  # at the limit is above it
    allocator.free(first)
    allocator.malloc(mib(12))
    assert layout(allocator) == [[(20, False)], [(12, True)]]
    allocator, (first,) = filled(40)
    allocator.free(first)
    allocator.malloc(mib(12))
    assert layout(allocator) == [[(12, True), (28, False)]]


@pytest.mark.parametrize(("size", "cached"), [(30, 40), (20, 30)])  # above the limit, and at it
def test_above_the_split_limit_blocks_are_taken_whole(size: int, cached: int) -> None:
    allocator, (first,) = filled(cached, options=SPLIT_LIMIT)
    allocator.free(first)
    allocator.malloc(mib(size))
    assert (layout(allocator), state(allocator)) == ([[(cached, True)]], (size, cached, cached))


def test_above_the_split_limit_blocks_that_are_far_too_large_are_left() -> None:
    for size, segments in (
        (50, [[(50, False)], [(30, True)]]),
        (49, [[(50, False)], [(30, True)]]),
        (48, [[(48, True)]]),
    ):
        allocator, (first,) = filled(size, options=SPLIT_LIMIT)
        allocator.free(first)
        allocator.malloc(mib(30))
        assert layout(allocator) == segments
    wide = AllocatorOptions(max_split_size_bytes=mib(20), max_non_split_rounding_bytes=mib(21))
    allocator, (first,) = filled(50, options=wide)
    allocator.free(first)
    allocator.malloc(mib(30))
    assert layout(allocator) == [[(50, True)]]


def test_with_a_split_limit_one_sufficient_block_is_returned_first() -> None:
    allocator, blocks = filled(60, 12, capacity=100, options=SPLIT_LIMIT)
    for block in blocks:
        allocator.free(block)
    allocator.malloc(mib(30))
    assert (layout(allocator), allocator.retries) == ([[(12, False)], [(30, True)]], 0)


@pytest.mark.parametrize(("size", "kept"), [(50, [[(20, False)], [(12, False)]]), (70, [[(12, False)]])])
def test_with_a_split_limit_the_largest_blocks_are_returned_until_there_is_room(size: int, kept: list[Any]) -> None:
    allocator, blocks = filled(20, 30, 24, 12, capacity=86, options=SPLIT_LIMIT)
    for block in blocks:
        allocator.free(block)
    allocator.malloc(mib(size))
    assert (layout(allocator), allocator.retries) == ([*kept, [(size, True)]], 0)


def test_with_a_split_limit_the_whole_cache_is_the_last_resort() -> None:
    allocator, blocks = filled(30, 12, capacity=60, options=SPLIT_LIMIT)
    for block in blocks:
        allocator.free(block)
    allocator.malloc(mib(44))  # the 30 would do with what is left on the card, but PyTorch wants 44 from the cache
    assert (layout(allocator), allocator.retries) == ([[(44, True)]], 1)


@pytest.mark.parametrize(
    ("size_bytes", "divisions", "expected"),
    [
        (1, 4, 512),
        (1200, 4, 1536),  # not above 512 * 4
        (2048, 4, 2048),
        (2500, 4, 2560),
        (5000, 4, 5120),
        (5120, 4, 5120),
        (1200 * MIB, 4, 1280 * MIB),
        (1200 * MIB, 8, 1280 * MIB),
        (1024 * MIB, 8, 1024 * MIB),
        (1200 * MIB + 1, 2, 1536 * MIB),
        (1200 * MIB + 1, 1, 1200 * MIB + 512),
        (1200 * MIB + 1, 0, 1200 * MIB + 512),
    ],
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(size_bytes: int, divisions: int, expected: int) -> None:
    allocator = CachingAllocator(None, AllocatorOptions(roundup_power2_divisions=divisions))
    assert allocator.round_size(size_bytes) == expected
    allocator.malloc(size_bytes)
    allocator.check()


def test_divisions_go_by_the_interval_of_the_size() -> None:
    options = AllocatorOptions.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    rounded = [CachingAllocator(None, options).round_size(mib(size)) / MIB for size in (3.1, 300, 600, 1100, 2100)]
    assert rounded == [pytest.approx(3.1, abs=0.001), 300, 768, 1280, 2304]


def test_the_large_segment_can_be_of_another_size() -> None:
    allocator, _ = filled(5, 9.5, 10, options=AllocatorOptions(large_segment_size_bytes=mib(12)))
    assert layout(allocator) == [[(5, True), (7, False)], [(9.5, True), (2.5, False)], [(10, True)]]


def test_garbage_of_at_least_mean_age_is_returned() -> None:
    for threshold, kept in ((0.55, [[(30, False)]]), (0.5, [])):
        options = AllocatorOptions(memory_fraction=0.5, garbage_collection_threshold=threshold)
        allocator, (old, young) = filled(20, 30, capacity=200, options=options)
        allocator.free(old)
        allocator.malloc(mib(22))
        allocator.free(young)
        allocator.malloc(mib(34))  # 72 MiB are reserved, 100 allowed
        assert (layout(allocator), allocator.retries) == ([*kept, [(22, True)], [(34, True)]], 0)


def test_garbage_stays_up_to_the_threshold() -> None:
    options = AllocatorOptions(memory_fraction=0.5, garbage_collection_threshold=0.5)
    allocator, blocks = filled(20, 30, capacity=200, options=options)
    for block in blocks:
        allocator.free(block)
    allocator.malloc(mib(34))
    assert layout(allocator) == [[(20, False)], [(30, False)], [(34, True)]]


def test_garbage_is_not_collected_without_a_memory_fraction() -> None:
    allocator, (first,) = filled(20, capacity=100, options=AllocatorOptions(garbage_collection_threshold=0.1))
    allocator.free(first)
    allocator.malloc(mib(40))
    assert state(allocator) == (40, 40, 60)


@pytest.mark.parametrize(("expandable_segments", "reserved"), [(False, 50), (True, 60)])
def test_a_memory_fraction_is_of_the_whole_card(expandable_segments: bool, reserved: int) -> None:
    options = AllocatorOptions(memory_fraction=0.5, expandable_segments=expandable_segments)
    allocator = CachingAllocator(mib(90), options, total_bytes=mib(100))
    allocator.malloc(mib(40))
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(11))
    assert (caught.value.total_bytes, caught.value.free_bytes) == (mib(100), mib(50))
    allocator.malloc(mib(10))  # PyTorch holds a segment of 10 MiB against the limit, and maps a page of 20
    assert state(allocator) == (50, 50, reserved)


def test_sizes_of_the_card_must_agree() -> None:
    with pytest.raises(UserError, match="give capacity_bytes"):
        CachingAllocator(None, AllocatorOptions(memory_fraction=0.5))
    with pytest.raises(UserError, match="total_bytes to be a whole number from 10"):
        CachingAllocator(10, total_bytes=9)
    with pytest.raises(UserError, match="capacity_bytes"):
        CachingAllocator(-1)


# expandable segments


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


# PYTORCH_ALLOC_CONF


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorOptions()),
        ("expandable_segments:True", EXPANDABLE),
        ("expandable_segments:False, max_split_size_mb : 128", AllocatorOptions(max_split_size_bytes=mib(128))),
        ("max_split_size_mb:64,max_split_size_mb:128,", AllocatorOptions(max_split_size_bytes=mib(128))),
        (
            "large_segment_size_mb:12,max_split_size_mb:14",
            AllocatorOptions(large_segment_size_bytes=mib(12), max_split_size_bytes=mib(14)),
        ),
        ("large_segment_size_mb:1000", AllocatorOptions(large_segment_size_bytes=mib(1000))),
        ("max_non_split_rounding_mb:21", AllocatorOptions(max_non_split_rounding_bytes=mib(21))),
        ("garbage_collection_threshold:0.8", AllocatorOptions(garbage_collection_threshold=0.8)),
        ("garbage_collection_threshold:1e-1", AllocatorOptions(garbage_collection_threshold=0.1)),
        ("per_process_memory_fraction:.5", AllocatorOptions(memory_fraction=0.5)),
        ("per_process_memory_fraction:1", AllocatorOptions()),
        ("backend:native,pinned_use_background_threads:True", AllocatorOptions()),
        ("roundup_power2_divisions:4", AllocatorOptions(roundup_power2_divisions=4)),
    ],
)
def test_options_are_read(text: str, expected: AllocatorOptions) -> None:
    assert AllocatorOptions.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),  # as read by PyTorch 2.13, which has some surprises
    [
        ("[256:1,512:2,1024:4,>:8]", (*[1] * 9, 2, 4, *[8] * 5)),
        ("[256:1,1024:4,>:8]", (*[1] * 9, 0, 4, *[8] * 5)),
        ("[256:1,1024:4]", (*[1] * 9, 0, 4, *[0] * 5)),
        ("[1024:4,256:2,>:8]", (*[4] * 8, 2, *[8] * 7)),
        ("[256:0,>:8]", (*[0] * 9, *[8] * 7)),
        ("[1:2,2:4,>:8]", (2, 4, *[8] * 14)),
        ("[131072:4]", (4,) * 16),
        ("[>:8]", (0, *[8] * 15)),
        ("[]", (0,) * 16),
    ],
)
def test_divisions_by_size_are_read_as_pytorch_reads_them(text: str, expected: tuple[int, ...]) -> None:
    assert AllocatorOptions.parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("expandable_segments:true", "True or False, found 'true'"),
        ("expandable_segments", "'key:value,key:value', found 'expandable_segments'"),
        ("max_split_size_mb=128", "'key:value,key:value'"),
        ("max_split_size_mb:", "'key:value,key:value'"),
        (",", "'key:value,key:value'"),
        ("max_split_size_mb:64,,expandable_segments:True", "found ',expandable_segments:True'"),
        ("roundup_power2_divisions:[256:1", "'key:value,key:value'"),
        ("max_split_size_mb:abc", "whole number, found 'abc'"),
        ("max_split_size_mb:128.5", "whole number"),
        ("max_split_size_mb:-1", "whole number"),
        ("max_split_size_mb:[1]", "whole number"),
        ("max_split_size_mb:19", "max_split_size_bytes to be a whole number from 20971520"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "from 41943040"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_bytes"),
        ("large_segment_size_mb:10", "large_segment_size_bytes"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold"),
        ("garbage_collection_threshold:nan", "a number from 0 to 1, found 'nan'"),
        ("per_process_memory_fraction:1.5", "memory_fraction from 0 to 1"),
        ("roundup_power2_divisions:3", "power of 2, found 3"),
        ("roundup_power2_divisions:[256:3]", "power of 2, found 3"),
        ("roundup_power2_divisions:[3:2]", "boundaries of roundup_power2_divisions to be powers of 2"),
        ("roundup_power2_divisions:[0:2]", "boundaries"),
        ("roundup_power2_divisions:[256]", "whole number"),
        ("roundup_power2_divisions:[a:2]", "whole number, found 'a'"),
        ("backend:cudaMallocAsync", "native, found 'cudaMallocAsync'"),
        ("max_split_mb:128", "found 'max_split_mb'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        AllocatorOptions.parse(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AllocatorOptions(max_split_size_bytes=20 * MIB + 1),
        lambda: AllocatorOptions(roundup_power2_divisions=(1, 2)),
        lambda: AllocatorOptions(roundup_power2_divisions=-1),
        lambda: AllocatorOptions(memory_fraction=-0.1),
    ],
)
def test_bad_options_are_refused_however_they_are_made(make: Callable[[], AllocatorOptions]) -> None:
    with pytest.raises(UserError):
        make()


# laws

SIZES = st.one_of(
    st.integers(1, 2 * MIB),
    st.integers(1, 30 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 9 * MIB, 10 * MIB, 11 * MIB, 19 * MIB, 20 * MIB, 21 * MIB, 45 * MIB]),
)
STEPS = st.lists(st.one_of(SIZES, st.integers(-200, -1), st.just(0)), max_size=60)
"""A size allocates, a negative number frees one of the live blocks, 0 empties the cache (one time in many)."""
OPTIONS = st.sampled_from(
    [
        AllocatorOptions.parse(text)
        for text in (
            "",
            "expandable_segments:True",
            "max_split_size_mb:20",
            "max_split_size_mb:25,max_non_split_rounding_mb:22",
            "roundup_power2_divisions:4",
            "roundup_power2_divisions:[1:2,8:4,>:16],expandable_segments:True",
            "large_segment_size_mb:13",
        )
    ]
)
LIMITED = st.sampled_from(
    [AllocatorOptions.parse("per_process_memory_fraction:0.8,garbage_collection_threshold:0.3")]
)  # needs a card of some size
CAPACITIES = st.one_of(st.none(), st.integers(0, 200 * MIB))


def run(
    allocator: CachingAllocator, steps: list[int], after: Callable[[int | None], None] = lambda _: None
) -> list[Block]:
    """Apply steps, calling `after` with the index of the freed block, if one was; the live blocks."""
    live: list[Block] = []
    for step in steps:
        freed = None
        if step > 0:
            with suppress(OutOfMemory):
                live.append(allocator.malloc(step))
        elif step == 0:
            allocator.empty_cache()
        elif live:
            freed = step % len(live)
            allocator.free(live.pop(freed))
        after(freed)
    return live


@settings(deadline=None, max_examples=400)
@given(STEPS, st.one_of(st.tuples(OPTIONS, CAPACITIES), st.tuples(LIMITED, st.integers(50 * MIB, 200 * MIB))))
def test_the_books_agree_after_every_step(steps: list[int], setup: tuple[AllocatorOptions, int | None]) -> None:
    options, capacity = setup
    allocator = CachingAllocator(capacity, options)

    def after(_: int | None) -> None:
        allocator.check()
        assert allocator.reserved_bytes >= allocator.allocated_bytes >= allocator.requested_bytes >= 0
        assert allocator.peak_reserved_bytes >= max(allocator.peak_allocated_bytes, allocator.reserved_bytes)
        assert allocator.peak_allocated_bytes >= max(allocator.peak_requested_bytes, allocator.allocated_bytes)
        assert capacity is None or allocator.peak_reserved_bytes <= capacity
        assert sum(segment.size_bytes for segment in allocator.segments()) == allocator.reserved_bytes

    live = run(allocator, steps, after)
    assert allocator.requested_bytes == sum(block.requested_bytes for block in live)
    for block in live:
        allocator.free(block)
        after(None)
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments()) == (0, [])


@settings(deadline=None, max_examples=50)
@given(STEPS, OPTIONS, CAPACITIES)
def test_the_same_steps_give_the_same_state(steps: list[int], options: AllocatorOptions, capacity: int | None) -> None:
    twins = [CachingAllocator(capacity, options) for _ in range(2)]
    for twin in twins:
        run(twin, steps)
    assert twins[0].segments() == twins[1].segments()
    assert twins[0].peak_reserved_bytes == twins[1].peak_reserved_bytes
    assert (twins[0].retries, twins[0].cuda_mallocs) == (twins[1].retries, twins[1].cuda_mallocs)


@settings(deadline=None, max_examples=100)
@given(st.lists(SIZES, max_size=40))
def test_without_frees_segments_add_up(sizes: list[int]) -> None:
    allocator = CachingAllocator()
    rests: dict[bool, list[int]] = {True: [], False: []}
    expected_bytes = 0
    for request in sizes:
        allocator.malloc(request)
        size = (request + 511) // 512 * 512
        rest = rests[size <= MIB]
        fits = [found for found in rest if found >= size]
        if fits:
            found = min(fits)
            rest.remove(found)
        else:
            found = bought_bytes(size)
            expected_bytes += found
        if found - size > (0 if size <= MIB else MIB):
            rest.append(found - size)
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == expected_bytes


def bought_bytes(size: int) -> int:
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB


class Plain:
    """The default rules once more, as lists of [size, live] and linear searches."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.segments: list[list[list[Any]]] = []
        self.live: list[list[Any]] = []

    def reserved(self) -> int:
        return sum(block[0] for segment in self.segments for block in segment)

    def malloc(self, request: int) -> bool:
        size = (request + 511) // 512 * 512
        small = size <= MIB
        bought = bought_bytes(size)
        fits = [
            (segment, block)
            for segment in reversed(self.segments)  # the youngest is the lowest
            if (sum(part[0] for part in segment) == 2 * MIB) == small  # no large segment is that small
            for block in segment
            if not block[1] and block[0] >= size
        ]
        if not fits:
            if not self.room(bought):
                self.empty()
            if not self.room(bought):
                return False
            self.segments.append([[bought, False]])
            fits = [(self.segments[-1], self.segments[-1][0])]
        segment, block = min(fits, key=lambda fit: fit[1][0])  # the first of equals
        rest = block[0] - size
        if rest > (0 if small else MIB):
            segment.insert(next(i for i, part in enumerate(segment) if part is block) + 1, [rest, False])
            block[0] = size
        block[1] = True
        self.live.append(block)
        return True

    def room(self, size: int) -> bool:
        return self.capacity is None or self.reserved() + size <= self.capacity

    def free(self, index: int) -> None:
        self.live.pop(index)[1] = False
        for segment in self.segments:
            merged: list[list[Any]] = []
            for part in segment:
                if merged and not merged[-1][1] and not part[1]:
                    merged[-1][0] += part[0]
                else:
                    merged.append(part)
            segment[:] = merged

    def empty(self) -> None:
        self.segments = [segment for segment in self.segments if len(segment) > 1 or segment[0][1]]


@settings(deadline=None, max_examples=400)
@given(STEPS, CAPACITIES)
def test_a_plain_rewrite_of_the_rules_agrees(steps: list[int], capacity: int | None) -> None:
    allocator, plain = CachingAllocator(capacity), Plain(capacity)
    remaining = iter(steps)

    def after(freed: int | None) -> None:
        step = next(remaining)
        ooms = allocator.ooms
        if step > 0:
            failed.append(not plain.malloc(step))
        elif step == 0:
            plain.empty()
        elif freed is not None:
            plain.free(freed)
        assert sum(failed) == ooms
        assert layout(allocator) == [[(size / MIB, live) for size, live in segment] for segment in plain.segments]

    failed: list[bool] = []
    run(allocator, steps, after)
