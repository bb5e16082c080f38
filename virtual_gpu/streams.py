"""CUDA streams and events as far as they decide memory: which stream a block belongs to, and when the host knows
that a stream has finished its work.

The device is taken to be slow: work is complete only when the host has waited for it. That is how a training loop
behaves that is bound by the device, and it is the upper bound of the memory for all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vramcast.virtual_gpu.allocator import Block, CachingAllocator


@dataclass(frozen=True)
class RecordStream:
    """Another stream uses a block (Tensor.record_stream)."""

    block: int
    stream: int


@dataclass(frozen=True)
class RecordEvent:
    """A CUDA event is recorded. Events are numbered from 1 in this order."""


@dataclass(frozen=True)
class Complete:
    """The host learns that streams have passed events, by stream and number."""

    passed: Mapping[int, int]


StreamOperation = RecordStream | RecordEvent | Complete


def apply_operation(operation: StreamOperation, allocator: CachingAllocator, live: Mapping[int, Block]) -> None:
    """Apply a stream operation of a trace to an allocator; `live` holds the allocated blocks by id."""
    if isinstance(operation, RecordStream):
        block = live.get(operation.block)
        if block is None:
            raise ValueError(f"block {operation.block} is recorded on stream {operation.stream} but is not allocated")
        allocator.record_stream(block, operation.stream)
    elif isinstance(operation, RecordEvent):
        allocator.record_event()
    else:
        allocator.complete(operation.passed)


@dataclass
class RecordedEvent:
    """A CUDA event: the work that is complete when it is complete."""

    passed: dict[int, int] = field(default_factory=dict)
    """The last event of each stream that comes before it, in program order and by waits."""


class StreamClock:
    """The order of work among streams, and the part of it that the host has waited for (vector clocks)."""

    def __init__(self) -> None:
        self._events = 0
        self._streams: dict[int, dict[int, int]] = {}
        """By stream: the last event of each other stream that it has waited for."""
        self._host: dict[int, int] = {}

    def record_event(self, stream: int) -> RecordedEvent:
        """Record an event on a stream."""
        self._events += 1
        return RecordedEvent({**self._streams.get(stream, {}), stream: self._events})

    def wait_event(self, stream: int, event: RecordedEvent) -> None:
        """Let a stream wait for an event."""
        _advance(self._streams.setdefault(stream, {}), event.passed)

    def synchronize(self, event: RecordedEvent) -> Complete:
        """Let the host wait for an event; return the operation for the trace."""
        return Complete(_advance(self._host, event.passed))


def _advance(clock: dict[int, int], passed: Mapping[int, int]) -> dict[int, int]:
    """Move a clock forward; return the entries that moved."""
    moved = {stream: event for stream, event in passed.items() if event > clock.get(stream, 0)}
    clock.update(moved)
    return moved
