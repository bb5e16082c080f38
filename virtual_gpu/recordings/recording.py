"""Memory snapshots as values: segments at the end, events in order, stacks.

The format is that of torch.cuda.memory._snapshot (torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/_memory_viz.py),
of any release: blocks of torch before 2.1 have no address and keep their sizes and frames in a history.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import SMALL_SEGMENT_BYTES
from vramcast.virtual_gpu.allocator.state import BlockState, BlockView, SegmentView

MOST_FRAMES = 2_000
"""The most frames of one stack; torch records fewer."""


class Action(StrEnum):
    """Kind of an event, in torch's words (TraceEntry::Action)."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"
    SNAPSHOT = "snapshot"


_ACTIONS = {str(action): action for action in Action}
_IGNORED = frozenset({"user_defined", "workspace_snapshot"})
"""Marks of the user, and events of cuBLAS without an effect on the allocator."""


class Frame(NamedTuple):
    """A place in a stack."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""Innermost frame first."""


class MemoryEvent(NamedTuple):
    """One event of a device."""

    action: Action
    address: int
    """The free memory of the device for an OOM."""
    size_bytes: int
    """As requested, not rounded."""
    stream: int
    stack: int
    """Index of the stack, -1 without one."""
    time_us: int = 0


@dataclass(frozen=True)
class RecordedSegment:
    """A segment at the end of a recording."""

    view: SegmentView
    expandable: bool
    private: bool
    """It belongs to the private pool of a CUDA graph or a MemPool."""
    stacks: Mapping[int, int]
    """The stack of each block that has one, by address."""


@dataclass(frozen=True)
class DeviceRecording:
    """The recording of one device."""

    device: int
    segments: tuple[RecordedSegment, ...]
    """By address."""
    events: tuple[MemoryEvent, ...]

    @property
    def final(self) -> list[SegmentView]:
        """Return the state at the end."""
        return [segment.view for segment in self.segments]


@dataclass(frozen=True)
class Recording:
    """A memory snapshot."""

    devices: tuple[DeviceRecording, ...]
    """Devices with a segment or an event."""
    stacks: tuple[Stack, ...]
    options: AllocatorOptions
    settings: Mapping[str, Any]
    """Settings of the allocator as recorded."""


class RecordingError(UserError):
    """A snapshot that cannot be understood."""

    def __init__(self, name: str, expected: str, actual: str):
        super().__init__(f"expected {expected} in {name}, found {actual}: record it again with _dump_snapshot")


def recording_of(values: Any, name: str) -> Recording:
    """Return the recording in the lists and dicts of a snapshot; raise RecordingError if they are not one."""
    if isinstance(values, list):  # torch.cuda.memory_snapshot()
        values = {"segments": values}
    if not isinstance(values, dict) or not isinstance(values.get("segments"), list):
        raise RecordingError(name, "a memory snapshot with 'segments'", type(values).__name__)
    reader = _Reader(name, values.get("stacks"))
    traces = values.get("device_traces") or []
    if not isinstance(traces, list):
        raise RecordingError(name, "'device_traces' as a list", type(traces).__name__)
    events = [reader.events(trace) for trace in traces]
    by_device: dict[int, list[RecordedSegment]] = {}
    for segment in values["segments"]:
        device, read = reader.segment(segment)
        by_device.setdefault(device, []).append(read)
    devices = sorted({*by_device, *(index for index, trace in enumerate(events) if trace)})
    settings = values.get("allocator_settings") or {}
    if not isinstance(settings, dict):
        raise RecordingError(name, "'allocator_settings' as a mapping", type(settings).__name__)
    return Recording(
        devices=tuple(
            DeviceRecording(
                index,
                tuple(sorted(by_device.get(index, []), key=lambda item: item.view.address)),
                events[index] if index < len(events) else (),
            )
            for index in devices
        ),
        stacks=tuple(reader.stacks),
        options=options_of(settings),
        settings=settings,
    )


def options_of(settings: Mapping[str, Any]) -> AllocatorOptions:
    """Return the allocator's options out of the settings of a snapshot."""
    text = settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if isinstance(text, str) and text:
        return AllocatorOptions.parse(text)
    limit = settings.get("max_split_size", -1)
    return AllocatorOptions(
        expandable_segments=bool(settings.get("expandable_segments")),
        max_split_size_bytes=limit if isinstance(limit, int) and 0 < limit < 1 << 40 else None,
    )


class _Reader:
    """Reads parts of a snapshot, with stacks that events share."""

    def __init__(self, name: str, stacks: Any) -> None:
        self._name = name
        self.stacks: list[Stack] = []
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[Stack, int] = {}
        self._shared = [self._stack(item) for item in stacks] if isinstance(stacks, list) else []

    def events(self, trace: Any) -> tuple[MemoryEvent, ...]:
        """Return the events of a device."""
        if not isinstance(trace, list):
            raise RecordingError(self._name, "events as a list", type(trace).__name__)
        read = map(self._event, trace)
        return tuple(event for event in read if event is not None)

    def _event(self, entry: Any) -> MemoryEvent | None:
        if not isinstance(entry, dict):
            raise RecordingError(self._name, "an event as a mapping", type(entry).__name__)
        action = entry.get("action")
        kind = _ACTIONS.get(action) if isinstance(action, str) else None
        if kind is None and isinstance(action, str) and action in _IGNORED:
            return None
        if kind is None:
            raise RecordingError(self._name, f"an action out of {sorted(Action)}", repr(action)[:60])
        address = entry.get("device_free" if action == "oom" else "addr", entry.get("addr", 0))
        return MemoryEvent(
            kind,
            self._count(address, "an address"),
            self._count(entry.get("size", 0), "a size"),
            self._count(entry.get("stream", 0), "a stream"),
            self._stack_of(entry),
            self._count(entry.get("time_us", 0), "a time"),
        )

    def segment(self, entry: Any) -> tuple[int, RecordedSegment]:
        """Return the device of a segment, and the segment."""
        if not isinstance(entry, dict) or not isinstance(entry.get("blocks"), list):
            raise RecordingError(self._name, "a segment with 'blocks'", type(entry).__name__)
        address = self._count(entry.get("address"), "an address")
        size_bytes = self._count(entry.get("total_size"), "a size")
        stacks: dict[int, int] = {}
        blocks: list[BlockView] = []
        place = address
        for item in entry["blocks"]:
            block, stack = self._block(item, place)
            blocks.append(block)
            place = block.address + block.size_bytes
            if stack >= 0:
                stacks[block.address] = stack
        if place != address + size_bytes or any(block.size_bytes <= 0 for block in blocks):
            raise RecordingError(self._name, "blocks that fill their segment", f"others at {address:#x}")
        kind = entry.get("segment_type")
        small = kind == "small" if kind in ("small", "large") else size_bytes <= SMALL_SEGMENT_BYTES
        stream = self._count(entry.get("stream", 0), "a stream")
        view = SegmentView(address, size_bytes, small, tuple(blocks), stream)
        private = tuple(entry.get("segment_pool_id") or (0, 0)) != (0, 0)
        device = self._count(entry.get("device", 0), "a device")
        return device, RecordedSegment(view, bool(entry.get("is_expandable")), private, stacks)

    def _block(self, entry: Any, place: int) -> tuple[BlockView, int]:
        """Return a block and the index of its stack; `place` is its address where none is recorded."""
        if not isinstance(entry, dict):
            raise RecordingError(self._name, "a block as a mapping", type(entry).__name__)
        history = entry.get("history")
        oldest = history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}
        size_bytes = self._count(entry.get("size"), "a size")
        address = self._count(entry.get("address", place), "an address")
        if address != place:
            raise RecordingError(self._name, f"a block at {place:#x}", f"one at {address:#x}")
        requested_bytes = self._count(entry.get("requested_size", oldest.get("real_size", size_bytes)), "a size")
        state = entry.get("state")
        if state == BlockState.FREE:
            return BlockView(address, size_bytes, 0, BlockState.FREE), -1
        active = BlockState.ALLOCATED if state == BlockState.ALLOCATED else BlockState.AWAITING_FREE
        view = BlockView(address, size_bytes, min(requested_bytes, size_bytes), active)
        return view, self._stack_of(entry if entry.get("frames") or "stack" in entry else oldest)

    def _stack_of(self, entry: Mapping[str, Any]) -> int:
        index = entry.get("stack")
        if index is not None:
            if not isinstance(index, int) or not 0 <= index < len(self._shared):
                raise RecordingError(self._name, f"a stack out of {len(self._shared)}", repr(index)[:60])
            return self._shared[index]
        frames = entry.get("frames")
        return self._stack(frames) if frames else -1

    def _stack(self, frames: Any) -> int:
        """Return the index of a stack; equal ones share it."""
        index = self._by_identity.get(id(frames))  # containers live as long as the snapshot that is being read
        if index is not None:
            return index
        if not isinstance(frames, list) or len(frames) > MOST_FRAMES:
            raise RecordingError(self._name, f"a stack of at most {MOST_FRAMES} frames", type(frames).__name__)
        stack = tuple(map(self._frame, frames))
        index = self._by_value.setdefault(stack, len(self.stacks))
        if index == len(self.stacks):
            self.stacks.append(stack)
        self._by_identity[id(frames)] = index
        return index

    def _frame(self, frame: Any) -> Frame:
        if isinstance(frame, dict):
            file, line, function = frame.get("filename", ""), frame.get("line", 0), frame.get("name", "")
        elif isinstance(frame, list) and len(frame) == 3:
            file, function, line = frame
        else:
            raise RecordingError(self._name, "a frame with file, line and function", type(frame).__name__)
        return Frame(str(file), line if isinstance(line, int) else 0, str(function))

    def _count(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise RecordingError(self._name, f"{what} as a whole number", repr(value)[:60])
        return value
