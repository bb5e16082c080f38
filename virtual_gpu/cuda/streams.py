"""Streams and events of the virtual GPU: blocks belong to the stream that they were allocated on.

The order of work among streams is that of virtual_gpu/allocator/streams.py.
"""

from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.allocator.allocator import MAIN_STREAM
from vramcast.virtual_gpu.allocator.streams import RecordedEvent, RecordEvent, StreamClock

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer


class Streams:
    """The streams of one virtual GPU; `active` is the one that the script sees."""

    active: "Streams"

    def __init__(self, device: Any, tracer: "ScriptTracer") -> None:
        self.device = device
        self._tracer = tracer
        self._clock = StreamClock()
        self._made = MAIN_STREAM
        Streams.active = self
        self.default = Stream(stream_id=MAIN_STREAM)
        self.current = self.default

    def new_id(self) -> int:
        """Return the number of a new stream."""
        self._made += 1
        return self._made

    def set(self, stream: "Stream | None") -> None:
        """Make a stream the current one."""
        if stream is not None:
            self.current = stream
            self._tracer.stream = stream.stream_id

    def record(self, stream: "Stream | None") -> RecordedEvent:
        """Record an event on a stream."""
        self._tracer.operate(RecordEvent())
        return self._clock.record_event()

    def wait(self, stream: "Stream | None", event: RecordedEvent) -> None:
        """Let a stream wait for an event, which changes no memory."""

    def finish(self, event: RecordedEvent) -> None:
        """Let the host wait for an event."""
        self._tracer.operate(self._clock.synchronize(event))

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        if self._made != MAIN_STREAM:
            self.finish(self.record(self.current))


class Stream:
    """A stream of the virtual GPU by its number."""

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **kwargs: Any) -> None:
        self.device = Streams.active.device
        self.stream_id = self.cuda_stream = Streams.active.new_id() if stream_id is None else stream_id
        self.device_index, self.device_type, self.priority = self.device.index, 1, priority

    def __enter__(self) -> "Stream":
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def wait_stream(self, stream: "Stream") -> None:
        """Wait for the work of another stream."""
        Streams.active.wait(self, Streams.active.record(stream))

    def wait_event(self, event: "Event") -> None:
        """Wait for an event."""
        event.wait(self)

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        Streams.active.finish(Streams.active.record(self))

    def query(self) -> bool:
        """Return True: the host may go on."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Return False: graphs are not supported."""
        return False


class ExternalStream(Stream):
    """A stream of another library."""


class Event:
    """An event of the virtual GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_event = 0
        self._recorded: RecordedEvent | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event on a stream."""
        self._recorded = Streams.active.record(stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        if self._recorded is not None:
            Streams.active.wait(stream, self._recorded)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        if self._recorded is not None:
            Streams.active.finish(self._recorded)

    def query(self) -> bool:
        """Return True: the host may go on."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Return a millisecond: there is no clock on the device."""
        return 1.0


class StreamContext:
    """Stands for `with torch.cuda.stream(stream)`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = Streams.active.current
        Streams.active.set(self.stream)

    def __exit__(self, *error: object) -> None:
        Streams.active.set(self._before)
