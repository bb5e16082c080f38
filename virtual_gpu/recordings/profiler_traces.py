"""Memory events of torch.profiler: the `[memory]` instants of a Chrome trace (profile_memory=True).

They have the size of each block, and the allocated and reserved bytes after it, but neither segments nor stacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vramcast.virtual_gpu.allocator.options import AllocatorOptions
from vramcast.virtual_gpu.recordings.alignment import AllocationStream
from vramcast.virtual_gpu.recordings.recording import Recording, RecordingError

_CUDA = 1
"""Device type, c10/core/DeviceType.h."""
WITHOUT_STACKS = Recording((), (), AllocatorOptions(), {})


@dataclass(frozen=True)
class ProfiledMemory:
    """The memory events of one device."""

    device: int
    stream: AllocationStream
    events: int
    largest_at_peak: tuple[tuple[int, int], ...]
    """Sizes of the blocks that were allocated in the trace and alive at the peak, with their number."""

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest that torch counted as allocated."""
        return max(self.stream.allocated)

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest that torch counted as reserved."""
        return max(self.stream.reserved)


def is_profiler_trace(values: Any) -> bool:
    """Return True for a Chrome trace."""
    return isinstance(values, dict) and isinstance(values.get("traceEvents"), list)


def profiled_memory(values: Mapping[str, Any], name: str) -> list[ProfiledMemory]:
    """Return the memory of each CUDA device of a trace; raise RecordingError if it has none."""
    by_device: dict[int, list[tuple[float, int, int, int, int]]] = {}
    for entry in values["traceEvents"]:
        if isinstance(entry, dict) and entry.get("name") == "[memory]":
            arguments = entry.get("args")
            if isinstance(arguments, dict) and arguments.get("Device Type") == _CUDA:
                numbers = _numbers(entry, arguments, name)
                by_device.setdefault(int(arguments.get("Device Id", 0)), []).append(numbers)
    if not by_device:
        raise RecordingError(name, "memory events of CUDA (torch.profiler.profile(profile_memory=True))", "none")
    return [_memory(device, sorted(events)) for device, events in sorted(by_device.items())]


def _numbers(entry: Mapping[str, Any], arguments: Mapping[str, Any], name: str) -> tuple[float, int, int, int, int]:
    values = [arguments.get(key) for key in ("Addr", "Bytes", "Total Allocated", "Total Reserved")]
    time = entry.get("ts")
    if not all(type(value) is int for value in values) or not isinstance(time, int | float):
        raise RecordingError(name, "whole numbers in a memory event", repr(values)[:60])
    address, size, allocated, reserved = (int(value or 0) for value in values)
    return float(time), address, size, allocated, reserved


def _memory(device: int, events: list[tuple[float, int, int, int, int]]) -> ProfiledMemory:
    births = [(index, size) for index, (_, _, size, _, _) in enumerate(events) if size > 0]
    stream = AllocationStream(
        sizes=tuple(size for _, size in births),
        events=tuple(index for index, _ in births),
        stacks=(-1,) * len(births),
        allocated=[event[3] for event in events],
        reserved=[event[4] for event in events],
    )
    peak = max(range(len(events)), key=lambda index: events[index][3])
    live: dict[int, int] = {}
    for _, address, size, _, _ in events[: peak + 1]:
        if size > 0:
            live[address] = size
        else:
            live.pop(address, None)
    counts: dict[int, int] = {}
    for size in live.values():
        counts[size] = counts.get(size, 0) + 1
    largest = sorted(counts.items(), key=lambda item: -item[0] * item[1])
    return ProfiledMemory(device, stream, len(events), tuple(largest))
