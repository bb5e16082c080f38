"""A device module for the meta device, as torch.cuda is one for CUDA: streams and events that a trace sees.

FSDP and DTensor look up `torch.<device type>`. The module is installed as `torch.meta` while a rank is traced, checked
with torch 2.13.
"""

import contextlib
import types
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from vramcast.virtual_gpu.allocator.streams import RecordedEvent, RecordEvent, StreamClock
from vramcast.virtual_gpu.tracing.trace import Tracer


class DeviceModule(types.ModuleType):
    """The counterpart of torch.cuda for a traced rank: one device, whose streams are numbers in the trace."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__("torch.meta")
        self.tracer = tracer
        self._clock = StreamClock()
        self._numbers = count(1)
        self._main = _Stream(self, tracer.stream)
        self._stack = [self._main]

    def Stream(self, *_: Any, **__: Any) -> "_Stream":  # noqa: N802 - torch.cuda's name
        """Return a new stream."""
        return _Stream(self, next(self._numbers))

    def Event(self, *_: Any, **__: Any) -> "_Event":  # noqa: N802 - torch.cuda's name
        """Return a new event."""
        return _Event(self)

    @contextlib.contextmanager
    def stream(self, stream: "_Stream | None") -> Iterator[None]:
        """Run a block on a stream."""
        self._stack.append(stream or self._stack[-1])
        before, self.tracer.stream = self.tracer.stream, self._stack[-1].number
        try:
            yield
        finally:
            self._stack.pop()
            self.tracer.stream = before

    def set_stream(self, stream: "_Stream") -> None:
        """Make a stream the current one."""
        self._stack[-1] = stream
        self.tracer.stream = stream.number

    def current_stream(self, *_: Any) -> "_Stream":
        """Return the current stream."""
        return self._stack[-1]

    def default_stream(self, *_: Any) -> "_Stream":
        """Return the main stream."""
        return self._main

    def record_event(self) -> RecordedEvent:
        """Record an event in the trace."""
        self.tracer.operate(RecordEvent())
        return self._clock.record_event()

    def wait_on_host(self, event: RecordedEvent) -> None:
        """Let the host wait for an event."""
        self.tracer.operate(self._clock.synchronize(event))

    def synchronize(self, *_: Any) -> None:
        """Let the host wait for all streams."""
        self.current_stream().synchronize()

    def current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def set_device(self, _: Any) -> None:
        """Accept the only device."""

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    @contextlib.contextmanager
    def device(self, _: Any) -> Iterator[None]:
        """Accept the only device for a block."""
        yield


class _Stream:
    """A stream: a number in the trace. Waits among streams do not change memory."""

    def __init__(self, module: DeviceModule, number: int) -> None:
        self.module = module
        self.number = number

    def wait_stream(self, other: "_Stream") -> None:
        pass

    def wait_event(self, event: "_Event") -> None:
        pass

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return (event or _Event(self.module)).record(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Event:
    """A CUDA event."""

    def __init__(self, module: DeviceModule) -> None:
        self.module = module
        self.recorded: RecordedEvent | None = None

    def record(self, stream: _Stream | None = None) -> "_Event":
        self.recorded = self.module.record_event()
        return self

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        if self.recorded is not None:
            self.module.wait_on_host(self.recorded)

    def query(self) -> bool:
        self.synchronize()
        return True


@contextlib.contextmanager
def device_module(tracer: Tracer) -> Iterator[DeviceModule]:
    """Install a device module as torch.meta."""
    module = DeviceModule(tracer)
    torch.meta = module  # type: ignore[attr-defined]
    try:
        yield module
    finally:
        del torch.meta  # type: ignore[attr-defined]
