"""The caching allocator: laws that hold for any sequence, and a plain rewrite that must agree."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from caching_allocators import layout
from hypothesis import given, settings
from hypothesis import strategies as st

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import MIB

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
