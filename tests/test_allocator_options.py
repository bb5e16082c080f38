"""What PYTORCH_ALLOC_CONF changes of the caching allocator, and how it is read."""

from collections.abc import Callable
from typing import Any

import pytest
from caching_allocators import EXPANDABLE, SPLIT_LIMIT, filled, layout, mib, state

from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import MIB


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
    with pytest.raises(UserError, match="set capacity_bytes"):
        CachingAllocator(None, AllocatorOptions(memory_fraction=0.5))
    with pytest.raises(UserError, match="total_bytes to be a whole number from 10"):
        CachingAllocator(10, total_bytes=9)
    with pytest.raises(UserError, match="capacity_bytes"):
        CachingAllocator(-1)


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
