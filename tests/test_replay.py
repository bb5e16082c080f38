"""Replays: peaks, where they fall, what was alive, where the card was full, and events that cannot be."""

import random
import time

import pytest

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, Block, CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.replay.replay import FREE, Event, replay

STEP: list[Event] = [
    (1, 11 * MIB),  # 12 MiB allocated and reserved
    (2, 5 * MIB),  # 17 allocated, 32 reserved
    (1, FREE),
    (3, 10 * MIB),  # out of the cached 12: 15 allocated
    (2, FREE),
    (4, 30 * MIB),  # 40 allocated, 62 reserved
    (3, FREE),
    (5, MIB),
    (4, FREE),
    (5, FREE),
]


def test_peaks_and_where_they_fall() -> None:
    found = replay(STEP, CachingAllocator())
    assert found.peak_requested_bytes == 40 * MIB
    assert found.peak_allocated_bytes == 40 * MIB
    assert found.peak_reserved_bytes == 64 * MIB  # the last MiB was in the small pool
    assert (found.requested_peak_event, found.peak_event, found.reserved_peak_event) == (5, 5, 7)
    assert found.live_at_peak == (3, 4)
    assert (found.retries, found.oom_event, found.oom_message) == (0, None, None)
    assert found.allocated_timeline is None is found.reserved_timeline


def test_requested_and_allocated_can_peak_at_different_events() -> None:
    events = [(1, 11 * MIB), (2, 11 * MIB), (1, FREE), (3, 11 * MIB + 1), (2, FREE), (3, FREE)]
    found = replay(events, CachingAllocator())
    assert (found.peak_allocated_bytes, found.peak_event) == (24 * MIB, 1)
    assert (found.peak_requested_bytes, found.requested_peak_event) == (22 * MIB + 1, 3)
    assert found.live_at_peak == (2, 3)


def test_timelines_have_a_point_for_each_event() -> None:
    found = replay(STEP, CachingAllocator(), timeline=True)
    assert found.allocated_timeline is not None
    assert found.reserved_timeline is not None
    assert [size // MIB for size in found.allocated_timeline] == [12, 17, 5, 15, 10, 40, 30, 31, 1, 0]
    assert [size // MIB for size in found.reserved_timeline] == [12, 32, 32, 32, 32, 62, 62, 64, 64, 64]
    assert max(found.allocated_timeline) == found.peak_allocated_bytes
    assert found.reserved_timeline.index(found.peak_reserved_bytes) == found.reserved_peak_event


def test_base_bytes_are_added_to_every_figure() -> None:
    plain = replay(STEP, CachingAllocator(64 * MIB), timeline=True)
    found = replay(STEP, CachingAllocator(64 * MIB), base_bytes=100, timeline=True)
    assert found.peak_requested_bytes == plain.peak_requested_bytes + 100
    assert found.peak_allocated_bytes == plain.peak_allocated_bytes + 100
    assert found.peak_reserved_bytes == plain.peak_reserved_bytes + 100
    assert list(found.allocated_timeline or ()) == [size + 100 for size in plain.allocated_timeline or ()]
    assert list(found.reserved_timeline or ()) == [size + 100 for size in plain.reserved_timeline or ()]
    assert found.oom_event is None


def test_the_replay_stops_where_the_card_is_full() -> None:
    found = replay(STEP, CachingAllocator(40 * MIB), timeline=True)
    assert (found.oom_event, found.retries) == (5, 1)
    assert found.oom_message is not None
    assert "Tried to allocate 30.00 MiB" in found.oom_message
    assert (found.peak_requested_bytes, found.peak_allocated_bytes) == (16 * MIB, 17 * MIB)
    assert (found.peak_reserved_bytes, found.live_at_peak) == (32 * MIB, (1, 2))
    assert len(found.allocated_timeline or ()) == len(found.reserved_timeline or ()) == 5


def test_a_card_that_is_full_for_the_first_event() -> None:
    found = replay([(1, 1)], CachingAllocator(MIB))
    assert (found.oom_event, found.peak_reserved_bytes, found.live_at_peak) == (0, 0, ())
    assert found.peak_event is found.requested_peak_event is found.reserved_peak_event is None


def test_a_retry_is_no_oom() -> None:
    found = replay(STEP, CachingAllocator(44 * MIB))  # the cached 20 MiB go back for the 30
    assert (found.oom_event, found.retries) == (None, 1)
    assert (found.peak_reserved_bytes, found.reserved_peak_event) == (44 * MIB, 7)


def test_a_peak_on_the_way_to_the_oom_counts() -> None:
    allocator = CachingAllocator(40 * MIB, AllocatorOptions(expandable_segments=True), total_bytes=1024 * MIB)
    handles: dict[int, Block] = {}
    replay([(1, 20 * MIB), (2, 20 * MIB), (1, FREE)], allocator, handles=handles)
    allocator.empty_cache()
    found = replay([(2, FREE), (3, 60 * MIB)], allocator, handles=handles)  # one page is mapped before it fails
    assert (found.oom_event, found.reserved_peak_event, found.peak_reserved_bytes) == (1, 1, 40 * MIB)
    assert allocator.reserved_bytes == 0


def test_no_events() -> None:
    found = replay([], CachingAllocator(0), timeline=True)
    assert (found.peak_reserved_bytes, found.live_at_peak, found.peak_event) == (0, (), None)
    assert len(found.allocated_timeline or ()) == 0


def test_blocks_of_no_size_are_alive() -> None:
    found = replay([(7, 0), (8, 1), (7, FREE), (8, FREE)], CachingAllocator())
    assert (found.live_at_peak, found.peak_allocated_bytes) == ((7, 8), 512)


def test_an_id_can_be_born_again() -> None:
    found = replay([(1, MIB), (1, FREE), (1, 2 * MIB), (1, FREE)], CachingAllocator())
    assert (found.peak_requested_bytes, found.requested_peak_event) == (2 * MIB, 2)


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([(1, 5), (2, FREE)], "event 1 frees block 2, which is not allocated"),
        ([(1, 5), (1, FREE), (1, FREE)], "event 2 frees block 1, which is not allocated"),
        ([(1, 5), (2, 5), (1, 7)], "event 2 allocates block 1, which is allocated already"),
        ([(1, -2)], "event 0 allocates -2 bytes"),
    ],
)
def test_events_that_cannot_be_are_named(events: list[Event], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replay(events, CachingAllocator())


def test_steps_can_be_replayed_one_by_one() -> None:
    setup: list[Event] = [(100, 15 * MIB), (101, 3 * MIB)]
    handles: dict[int, Block] = {}
    allocator = CachingAllocator()
    first = replay(setup, allocator, handles=handles)
    assert (first.peak_reserved_bytes, sorted(handles)) == (36 * MIB, [100, 101])
    for _ in range(2):
        found = replay(STEP, allocator, handles=handles)
    whole = replay([*setup, *STEP, *STEP], CachingAllocator())
    assert found.peak_reserved_bytes == whole.peak_reserved_bytes
    assert found.peak_requested_bytes == whole.peak_requested_bytes
    assert found.live_at_peak == whole.live_at_peak == (100, 101, 3, 4)
    assert found.reserved_peak_event is None  # reserved at the start already
    assert found.retries == 0
    with pytest.raises(ValueError, match="event 0 allocates block 100"):
        replay(setup, allocator, handles=handles)


def test_the_same_events_give_the_same_replay() -> None:
    options = AllocatorOptions(expandable_segments=True)
    first, second = (replay(STEP, CachingAllocator(60 * MIB, options), timeline=True) for _ in range(2))
    assert first == second
    assert first.peak_reserved_bytes == 42 * MIB


def training_steps(layers: int, count: int) -> list[Event]:
    """Forward and backward passes over layers of mixed sizes, on top of parameters."""
    draw = random.Random(0)
    events: list[Event] = [(number, int(2 ** draw.uniform(8, 24))) for number in range(3 * layers)]
    sizes = [int(2 ** draw.uniform(8, 25)) for _ in range(layers)]
    number = len(events)
    while len(events) < count:
        alive = []
        for size in sizes:
            events += [(number, size), (number + 1, size), (number + 2, size // 8), (number, FREE)]
            alive += [number + 1, number + 2]
            number += 3
        while alive:
            chosen = alive.pop(draw.randrange(max(0, len(alive) - 4), len(alive)))
            events += [(number, int(2 ** draw.uniform(8, 24))), (chosen, FREE), (number, FREE)]
            number += 1
    return events[:count]


def test_a_hundred_thousand_events_take_about_a_second() -> None:
    events = training_steps(layers=500, count=100_000)
    allocator = CachingAllocator()
    start = time.process_time()
    found = replay(events, allocator)
    seconds = time.process_time() - start
    allocator.check()
    assert len(found.live_at_peak) > 2000
    assert seconds < 3  # a third of that is usual: this is for a data structure gone wrong, not for a busy machine
