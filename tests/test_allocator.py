"""The caching allocator: sequences worked out by hand from PyTorch's rules."""

import pickle

import pytest
from caching_allocators import GIB, filled, layout, mib, state

from vramcast.virtual_gpu.allocator.allocator import CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import MIB

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
