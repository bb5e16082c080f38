"""The history of a long run within bounds: stretches of the trace without a new peak leave what outlives them alone.

A stretch ends where a network is called or an optimizer has stepped. Blocks that are born and freed within a dropped
stretch disappear from the trace, and their numbers are used again. All stretches with a new peak stay, so that the
peak, what is alive there, and the snapshot around it are those of the whole run.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramcast.virtual_gpu.replay.replay import FREE, STREAM_OPERATION, Event

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.run_record import RunRecord
    from vramcast.virtual_gpu.cuda.script_memory import ScriptMemory
    from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer

MOST_EVENTS = 500_000
"""Of about 100 bytes each."""


class TraceHistory:
    """Drops what is not needed of a trace whenever it has grown too long."""

    def __init__(self, tracer: "ScriptTracer", memory: "ScriptMemory", record: "RunRecord") -> None:
        self.dropped_events = 0
        self.most_events: float = MOST_EVENTS
        self._tracer = tracer
        self._memory = memory
        self._record = record
        self._ends: list[tuple[int, bool]] = []
        """The event after each stretch, and whether the stretch had a new peak."""
        self._peaks = (0, 0, 0)
        self._least = 0

    def end_stretch(self) -> None:
        """Note that a stretch is over, and shorten the trace if it is too long."""
        peak, count = self._record.peak, len(self._tracer.trace.events)
        peaks = (peak.allocated_bytes, peak.reserved_bytes, self._memory.allocator.peak_requested_bytes)
        self._ends.append((count, peaks != self._peaks))
        self._peaks = peaks
        if count > max(self.most_events, 2 * self._least):
            with self._memory.at_rest():
                self._shorten()

    def _shorten(self) -> None:
        trace = self._tracer.trace
        before = len(trace.events)
        events: list[Event] = []
        for start, end, has_peak in self._stretches():
            stretch = trace.events[start:end]
            events += stretch if has_peak else self._outliving(stretch)
        events += trace.events[self._ends[-1][0] :]
        operations = [trace.stream_operations[size] for block, size in events if block == STREAM_OPERATION]
        numbers = iter(range(len(operations)))
        trace.events[:] = [
            (block, next(numbers)) if block == STREAM_OPERATION else (block, size) for block, size in events
        ]
        trace.stream_operations[:] = operations
        self._least = len(trace.events)
        self._ends = [(self._least, True)]
        self.dropped_events += before - self._least

    def _stretches(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the stretches, with neighbours without a new peak as one."""
        start = 0
        for index, (end, has_peak) in enumerate(self._ends):
            following = self._ends[index + 1][1] if index + 1 < len(self._ends) else True
            if has_peak or following:
                yield start, end, has_peak
                start = end

    def _outliving(self, stretch: list[Event]) -> list[Event]:
        """Return the events of blocks that live before or after a stretch, and give up the others."""
        born = {block for block, size in stretch if block >= 0 and size != FREE}
        inner = {block for block, size in stretch if size == FREE and block in born}
        self._tracer.give_up(inner)
        return [event for event in stretch if event[0] >= 0 and event[0] not in inner]
