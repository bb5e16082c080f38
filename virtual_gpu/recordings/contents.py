"""The contents of a device at one event of its recording: by kind, by line, and what the cache holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from vramcast.virtual_gpu.allocator.allocator import CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from vramcast.virtual_gpu.allocator.state import BlockState, SegmentView
from vramcast.virtual_gpu.recordings import places
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, Recording, Stack
from vramcast.virtual_gpu.recordings.rewinding import start_state


class BlockKind(StrEnum):
    """Kind of a block, as far as stacks and lifetimes tell."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"
    INPUTS = "inputs"
    KEPT = "kept by the script"
    BEFORE = "before the recording"


class Life(NamedTuple):
    """A block from its allocation to its free, as indices of events."""

    born: int
    """-1 if it existed before the first event."""
    dies: int
    """The number of events if it is never freed."""
    address: int
    size_bytes: int
    stack: int
    freed_by: int
    """The stack of its free, -1 without one."""


@dataclass(frozen=True)
class Contents:
    """The state of a device after an event."""

    event: int
    allocated_bytes: int
    reserved_bytes: int
    rounding_bytes: int
    """Allocated beyond what was requested."""
    by_kind: dict[str, int]
    by_line: dict[tuple[str, str], int]
    """By line of the user's code and operator."""
    cached_segment_bytes: int
    """Whole free segments, or pages, which torch.cuda.empty_cache() returns."""
    split_bytes: int
    """Free blocks of segments that hold a block in use (inactive split blocks)."""
    largest_free_bytes: int


def lives(device: DeviceRecording, start: list[SegmentView]) -> list[Life]:
    """Return all blocks of a recording by their first event."""
    stacks = {place: stack for segment in device.segments for place, stack in segment.stacks.items()}
    open_lives: dict[int, tuple[int, int, int]] = {}
    for view in start:
        for block in view.blocks:
            if block.state is not BlockState.FREE:
                open_lives[block.address] = (-1, block.requested_bytes, -1)
    freed_by: dict[int, int] = {}
    ended: list[Life] = []
    for index, event in enumerate(device.events):
        if event.action is Action.ALLOC:
            open_lives[event.address] = (index, event.size_bytes, event.stack)
        elif event.action is Action.FREE_REQUESTED:
            freed_by[event.address] = event.stack
        elif event.action is Action.FREE_COMPLETED and event.address in open_lives:
            born, size, stack = open_lives.pop(event.address)
            ended.append(Life(born, index, event.address, size, stack, freed_by.pop(event.address, event.stack)))
    count = len(device.events)
    ended += [
        Life(born, count, address, size, stack if stack >= 0 else stacks.get(address, -1), -1)
        for address, (born, size, stack) in open_lives.items()
    ]
    return sorted(ended)


class Kinds:
    """Tells the kind of each block of one device."""

    def __init__(self, recording: Recording, device: DeviceRecording) -> None:
        self._stacks = recording.stacks
        self._count = len(device.events)
        stacks = [self._stack(event.stack) for event in device.events]
        steps = (
            event.action is Action.ALLOC and not places.in_optimizer(stack)
            for event, stack in zip(device.events, stacks, strict=True)
        )
        self._outside = [0, *accumulate(map(int, steps))]
        """Number of allocations outside of optimizers before each event."""

    def _stack(self, index: int) -> Stack:
        return self._stacks[index] if index >= 0 else ()

    def of(self, life: Life) -> BlockKind:
        """Return the kind of a block."""
        stack = self._stack(life.stack)
        use = places.simulated_use(stack)
        if use is not None:
            return _KINDS_OF_USES.get(use, BlockKind.KEPT)
        ends = self._stack(life.freed_by) if life.dies < self._count else None
        if life.born < 0 and life.stack < 0:
            return _of_before(ends)
        if places.in_workspace(stack):
            return BlockKind.WORKSPACE
        if places.in_optimizer(stack):
            outlives = ends is None or self._outside[life.dies] > self._outside[max(life.born, 0)]
            return BlockKind.OPTIMIZER if outlives else BlockKind.TEMPORARIES
        return _of_network(stack, ends)


def _of_network(stack: Stack, ends: Stack | None) -> BlockKind:
    """Return the kind of a block of a forward or backward pass; `ends` is the stack of its free, if it is freed."""
    freed_in_backward = ends is not None and places.in_backward(ends)
    if places.in_backward(stack):
        return BlockKind.TEMPORARIES if freed_in_backward else BlockKind.GRADIENTS
    if freed_in_backward:
        return BlockKind.ACTIVATIONS
    if places.makes_parameters(stack):
        return BlockKind.PARAMETERS
    if ends is not None:
        return BlockKind.TEMPORARIES
    return BlockKind.ACTIVATIONS if places.in_forward(stack) else BlockKind.KEPT


def _of_before(ends: Stack | None) -> BlockKind:
    """Return the kind of a block without a stack, by that of its free."""
    if ends and places.clears_gradients(ends):
        return BlockKind.GRADIENTS
    return BlockKind.ACTIVATIONS if ends and places.in_backward(ends) else BlockKind.BEFORE


def contents_at(
    recording: Recording, device: DeviceRecording, blocks: Sequence[Life], event: int, name: str
) -> Contents:
    """Return the contents after an event (-1: before the first)."""
    state = start_state(replace(device, events=device.events[event + 1 :]), recording.options, name)
    kinds = Kinds(recording, device)
    by_kind: Counter[str] = Counter()
    by_line: Counter[tuple[str, str]] = Counter()
    for life in blocks:
        if life.born <= event < life.dies:
            kind = kinds.of(life)
            by_kind[str(kind)] += life.size_bytes
            stack = recording.stacks[life.stack] if life.stack >= 0 else ()
            line = places.line_of(stack) or _without_line(stack, kind)
            by_line[line, places.operator_of(stack)] += life.size_bytes
    active = [block for view in state for block in view.blocks if block.state is not BlockState.FREE]
    allocated = sum(block.size_bytes for block in active)
    cached, split, largest = _free_memory(device, state)
    return Contents(
        event=event,
        allocated_bytes=allocated,
        reserved_bytes=sum(view.size_bytes for view in state),
        rounding_bytes=allocated - sum(block.requested_bytes for block in active),
        by_kind=dict(by_kind.most_common()),
        by_line=dict(by_line.most_common()),
        cached_segment_bytes=cached,
        split_bytes=split,
        largest_free_bytes=largest,
    )


def _without_line(stack: Stack, kind: BlockKind) -> str:
    """Return what stands for a line where a stack has none: autograd's threads run no Python."""
    if kind is BlockKind.BEFORE:
        return str(kind)
    return "backward pass" if places.in_backward(stack) else "no Python line"


def _free_memory(device: DeviceRecording, state: list[SegmentView]) -> tuple[int, int, int]:
    """Return the bytes that the allocator can return, those that it cannot, and the largest free block."""
    expandable = {segment.view.address for segment in device.segments if segment.expandable}
    expands = bool(expandable) or any(event.action is Action.SEGMENT_MAP for event in device.events)
    cached = split = largest = 0
    for view in state:
        page_bytes = SMALL_SEGMENT_BYTES if view.small else LARGE_SEGMENT_BYTES
        for block in view.blocks:
            if block.state is not BlockState.FREE:
                continue
            largest = max(largest, block.size_bytes)
            first = -(-block.address // page_bytes) * page_bytes
            last = (block.address + block.size_bytes) // page_bytes * page_bytes
            returned = max(last - first, 0) if expands else block.size_bytes * (len(view.blocks) == 1)
            cached += returned
            split += block.size_bytes - returned
    return cached, split, largest


def peak_event(recording: Recording, device: DeviceRecording, start: list[SegmentView]) -> int:
    """Return the event after which the most memory was allocated, -1 for the start."""
    round_size = CachingAllocator(None, recording.options).round_size
    size = sum(b.size_bytes for view in start for b in view.blocks if b.state is BlockState.ALLOCATED)
    best, peak = size, -1
    for index, event in enumerate(device.events):
        if event.action is Action.ALLOC:
            size += round_size(event.size_bytes)
            if size > best:
                best, peak = size, index
        elif event.action is Action.FREE_REQUESTED:
            size -= round_size(event.size_bytes)
    return peak


_KINDS_OF_USES = {
    "parameters": BlockKind.PARAMETERS,
    "gradients": BlockKind.GRADIENTS,
    "optimizer_state": BlockKind.OPTIMIZER,
    "inputs": BlockKind.INPUTS,
    "activations": BlockKind.ACTIVATIONS,
    "temporaries": BlockKind.TEMPORARIES,
    "workspace": BlockKind.WORKSPACE,
}
