"""The caching allocator with several streams, worked out by hand, and the order of work among streams."""

import pytest
import torch
from caching_allocators import GIB, mib
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_traces import numbers

from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.allocator.state import BlockState
from vramcast.virtual_gpu.allocator.streams import Complete, RecordEvent, RecordStream, StreamClock
from vramcast.virtual_gpu.operators.storage_resizes import traced_resizes
from vramcast.virtual_gpu.replay.replay import FREE, STREAM_OPERATION, replay
from vramcast.virtual_gpu.tracing.trace import Tracer


def test_a_stream_does_not_reuse_cached_blocks_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(mib(30)))
    allocator.malloc(mib(30), stream=1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (mib(30), mib(60))
    allocator.malloc(mib(30))
    assert allocator.reserved_bytes == mib(60)
    assert [segment.stream for segment in allocator.segments()] == [1, 0]
    allocator.check()


def test_streams_share_the_capacity_and_a_retry_empties_the_cache_of_all() -> None:
    allocator = CachingAllocator(mib(50))
    allocator.free(allocator.malloc(mib(30)))
    allocator.malloc(mib(40), stream=1)  # the cache of the main stream goes back first
    assert (allocator.retries, allocator.reserved_bytes) == (1, mib(40))
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 12.00 MiB"):
        allocator.malloc(mib(12))
    allocator.check()


def test_expandable_segments_are_one_for_each_stream() -> None:
    allocator = CachingAllocator(GIB, AllocatorOptions(expandable_segments=True))
    allocator.free(allocator.malloc(mib(50)))
    allocator.malloc(mib(50), stream=3)
    assert allocator.reserved_bytes == mib(120)
    assert len(allocator.segments()) == 2


def test_a_block_that_another_stream_uses_is_free_when_that_stream_has_passed() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(mib(30))
    allocator.record_stream(block, 1)
    before = allocator.record_event()
    allocator.free(block)
    assert (allocator.allocated_bytes, allocator.active_bytes, allocator.requested_bytes) == (0, mib(30), mib(30))
    assert allocator.segments()[0].blocks[0].state is BlockState.AWAITING_FREE
    allocator.complete(before)  # recorded before the free: says nothing about it
    allocator.malloc(mib(30))
    assert (allocator.reserved_bytes, allocator.peak_active_bytes) == (mib(60), mib(60))
    assert allocator.peak_allocated_bytes == mib(30)
    allocator.complete(allocator.record_event())
    assert allocator.active_bytes == mib(30)
    allocator.malloc(mib(30))
    assert allocator.reserved_bytes == mib(60)
    allocator.check()


def test_a_use_on_the_blocks_own_stream_does_not_defer_its_free() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(mib(30), stream=2)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert allocator.active_bytes == 0
    allocator.check()


def test_a_full_device_waits_for_all_streams() -> None:
    allocator = CachingAllocator(mib(50))
    block = allocator.malloc(mib(30))
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.malloc(mib(40))
    assert (allocator.retries, allocator.reserved_bytes, allocator.active_bytes) == (1, mib(40), mib(40))


def test_a_block_that_awaits_a_stream_is_not_merged_and_not_freed_twice() -> None:
    allocator = CachingAllocator()
    left, right = allocator.malloc(mib(5)), allocator.malloc(mib(5))
    allocator.record_stream(left, 1)
    allocator.free(left)
    allocator.free(right)
    allocator.check()
    assert [block.size_bytes // MIB for block in allocator.segments()[0].blocks] == [5, 15]
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(left)
    with pytest.raises(ValueError, match="no stream can use it"):
        allocator.record_stream(left, 2)
    allocator.synchronize()
    assert [block.size_bytes // MIB for block in allocator.segments()[0].blocks] == [20]


STEPS = st.lists(st.tuples(st.integers(-30, 25 * MIB), st.integers(0, 2)), max_size=50)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.booleans(), st.one_of(st.none(), st.integers(0, 150 * MIB)))
def test_the_state_is_consistent_with_several_streams(
    steps: list[tuple[int, int]], expandable: bool, capacity: int | None
) -> None:
    allocator = CachingAllocator(capacity, AllocatorOptions(expandable_segments=expandable))
    live = []
    for size, stream in steps:
        if size > 0:
            try:
                live.append(allocator.malloc(size, stream))
            except OutOfMemory:
                assert capacity is not None
        elif live and size % 3 == 0:
            allocator.free(live.pop(size % len(live)))
        elif live and size % 3 == 1:
            allocator.record_stream(live[size % len(live)], stream)
        else:
            allocator.complete(allocator.record_event())
        allocator.check()
        assert allocator.peak_reserved_bytes >= allocator.peak_active_bytes >= allocator.active_bytes
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.active_bytes, allocator.requested_bytes) == (0, 0, 0)


def test_events_are_numbered_in_the_order_of_recording() -> None:
    clock = StreamClock()
    first, last = clock.record_event(), clock.record_event()
    assert (clock.synchronize(last), clock.synchronize(first)) == (Complete(2), Complete(1))


def test_a_replay_places_blocks_on_streams_and_frees_them_by_events() -> None:
    events = [
        (0, 30 * MIB), (STREAM_OPERATION, 0), (0, FREE), (1, 30 * MIB), (STREAM_OPERATION, 1), (STREAM_OPERATION, 2),
        (2, 30 * MIB), (3, 12 * MIB),
    ]  # fmt: skip
    operations = [RecordStream(0, 1), RecordEvent(), Complete(1)]
    result = replay(events, CachingAllocator(), streams={3: 1}, operations=operations)
    assert result.peak_reserved_bytes == 72 * MIB  # block 2 reuses the memory of block 0; block 3 is on stream 1
    assert (result.peak_allocated_bytes, result.peak_active_bytes) == (72 * MIB, 72 * MIB)
    assert result.live_at_peak == (1, 2, 3)
    without = replay([event for event in events if event != (STREAM_OPERATION, 2)], CachingAllocator(),
                     streams={3: 1}, operations=operations)  # fmt: skip
    assert without.peak_reserved_bytes == 102 * MIB
    assert (without.peak_allocated_bytes, without.peak_active_bytes) == (72 * MIB, 102 * MIB)


def test_a_freed_block_cannot_be_recorded_on_a_stream() -> None:
    with pytest.raises(ValueError, match="block 7 is recorded on stream 1 but is not allocated"):
        replay([(STREAM_OPERATION, 0)], CachingAllocator(), operations=[RecordStream(7, 1)])


def test_a_resize_of_a_storage_is_a_free_and_an_allocation() -> None:
    tracer = Tracer({})
    original = torch.UntypedStorage.resize_
    with traced_resizes(tracer), tracer:
        tensor = torch.empty(256, device="meta")
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(2048)
        torch.empty(8).untyped_storage().resize_(4)  # host memory
        del tensor
    assert tracer.trace.events == [(0, 1024), (0, FREE), (1, 2048), (1, FREE)]
    assert torch.UntypedStorage.resize_ is original


def test_a_storage_that_is_empty_when_it_dies_is_freed_once() -> None:
    tracer = Tracer({})
    with traced_resizes(tracer), tracer:
        tensor = torch.empty(256, device="meta")
        tensor.untyped_storage().resize_(0)
        del tensor
    assert tracer.trace.events == [(0, 1024), (0, FREE)]


def test_the_tracer_notes_the_stream_of_new_blocks_and_of_uses() -> None:
    tracer = Tracer({})
    with tracer:
        main = numbers(4)
        tracer.stream = 2
        side = numbers(4)
        tracer.record_stream(main, 2)
        tracer.record_stream(side, 2)  # its own stream
    assert tracer.trace.streams == {1: 2}
    assert tracer.trace.stream_operations == [RecordStream(0, 2)]
    assert tracer.trace.events[2] == (STREAM_OPERATION, 0)
