"""Runs whose batches vary in length: steps that were traced at three lengths stand for steps of any length.

A shorter batch splits the cached segments of a longer one, and a longer batch does not fit into those of a shorter. So
the cache of a run with many lengths grows far beyond the memory of its longest batch, by an amount that depends on the
order of the batches. The size of each allocation is a polynomial of the length: memory of activations grows linearly,
memory of attention scores with the square. Three traced lengths therefore give the sizes at all others, and a replay of
an order costs milliseconds a batch.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch

from vramcast.virtual_gpu.allocator.allocator import Block, CachingAllocator, OutOfMemory
from vramcast.virtual_gpu.allocator.options import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import SMALL_SIZE_BYTES
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.length_orders import STEP_BATCHES, TRACED_STEPS
from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE, FREE, Event
from vramcast.virtual_gpu.tracing.trace import Trace, call_of

_OWN, _PREVIOUS, _TWO_BACK, _FIRST, _FIRST_BEFORE, _LAST_BEFORE = range(6)
"""Tables of live blocks: of this batch, of the two before it, of the first batch of this step, and of the first and the
last batch of the step before."""
_ALLOCATE, _EMPTY, _TEMPORARY = -1, -2, -3

_Operation = tuple[int, int]
"""An action and its block: the ordinal of an allocation of this batch, or the place in the table of another."""
_Live = list[Block | None]


class StepsDifferError(Exception):
    """Steps of different lengths do not make the same allocations, so one cannot stand for another."""


@dataclass(frozen=True)
class _Batch:
    """The allocations and frees of one batch, and the sizes of its allocations.

    Temporaries of kernels, which are freed at once, stand apart: a kernel may need one from some length on.
    """

    operations: tuple[_Operation, ...]
    sizes: tuple[int, ...]
    survivors: tuple[int, ...]
    """Allocations that outlive the batch: its table of live blocks."""
    blocks: tuple[int, ...]
    """The block of each allocation in the trace."""
    temporaries: Mapping[int, tuple[int, ...]]
    """Sizes by the number of operations before them."""


class VaryingRun:
    """A job that was traced at several lengths, replayed with any order of lengths on one device."""

    def __init__(
        self,
        trace: Trace,
        profile: DeviceProfile,
        starts: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> None:
        """Read the traced steps: `starts` [steps, batches] are the first events of their batches."""
        if trace.streams or trace.stream_operations:
            raise StepsDifferError("the steps use several streams")
        if len(lengths) != TRACED_STEPS or len({len(item) for item in starts}) != 1:
            raise StepsDifferError(
                f"expected {TRACED_STEPS} steps of equally many batches, found {list(map(len, starts))}"
            )
        self._events = _sized(trace, profile)
        self._capacity_bytes = profile.capacity_bytes(trace.has_convolutions, trace.has_batch_norm, trace.world_size)
        self._total_bytes = profile.available_bytes
        self._freed = {block for block, size in self._events if size == FREE}
        """Others stay, such as caches of positions."""
        self._lead_in = self._events[: starts[2][0]]
        steps = self._read(starts)
        self._steady, alike = steps[1], steps[2:]
        if any([batch.operations for batch in step] != [batch.operations for batch in alike[0]] for step in alike):
            raise StepsDifferError("steps of different lengths make other allocations")
        self._lengths = lengths[2:]
        self._batches = [_Varying(self._lengths, batches) for batches in zip(*alike, strict=True)]

    def reserved_bytes(
        self, order: Sequence[int], accumulate: int = 1, options: AllocatorOptions | None = None
    ) -> int | None:
        """Return the peak of a run with batches in this order, None if it runs out of memory."""
        allocator = CachingAllocator(self._capacity_bytes, options, total_bytes=self._total_bytes)
        try:
            live = self._lead(allocator)
            for position, length in zip(self._positions(accumulate), order, strict=False):
                live = self._batches[position].play(allocator, length, live, opens=position == 0)
        except OutOfMemory:
            return None
        return allocator.peak_reserved_bytes

    def _positions(self, accumulate: int) -> Iterator[int]:
        """Yield which of the traced batches comes next; those between the second and the last are alike."""
        count = len(self._batches)
        if (count < STEP_BATCHES and accumulate != count) or accumulate < count:
            raise ValueError(f"expected steps of {accumulate} batches, found {count} traced")
        step = [*range(count - 1), *[count - 2] * (accumulate - count), count - 1]
        while True:
            yield from step

    def _lead(self, allocator: CachingAllocator) -> list[_Live]:
        """Play the first two steps as they were traced, and return the tables of their live blocks.

        Their cache is dropped: no run begins with the longest batch on purpose.
        """
        live: dict[int, Block] = {}
        for block, size in self._lead_in:
            if block < 0:
                allocator.empty_cache()
            elif size == FREE:
                allocator.free(live.pop(block))
            else:
                live[block] = allocator.malloc(size)
        allocator.empty_cache()
        tables: list[_Live] = [
            [
                live.get(block) if block in self._freed else None
                for block in (batch.blocks[item] for item in batch.survivors)
            ]
            for batch in self._steady
        ]
        return [tables[-1], tables[-2] if len(tables) > 1 else [], tables[0], [], []]

    def _read(self, starts: Sequence[Sequence[int]]) -> list[list[_Batch]]:
        """Return the batches of all traced steps."""
        ends = [*(item for step in starts for item in step), len(self._events)]
        count = len(starts[0])
        births: dict[int, tuple[int, int]] = {}
        batches = []
        for place, (start, end) in enumerate(pairwise(ends)):
            batches.append(self._batch(self._events[start:end], place, count, births))
            for index, ordinal in enumerate(batches[-1].survivors):
                births[batches[-1].blocks[ordinal]] = place, index
        return [batches[first : first + count] for first in range(0, len(batches), count)]

    def _batch(self, events: Sequence[Event], place: int, count: int, births: dict[int, tuple[int, int]]) -> _Batch:
        """Read one batch; `births` has the batch of each live block, and its place in the table of that batch."""
        operations: list[_Operation] = []
        sizes: list[int] = []
        blocks: list[int] = []
        temporaries: dict[int, list[int]] = defaultdict(list)
        skipped = None
        for (block, size), following in zip_longest(events, events[1:]):
            if (block, size) == EMPTY_CACHE:
                operations.append((_EMPTY, 0))
            elif block == skipped:
                skipped = None
            elif size != FREE and following == (block, FREE):
                temporaries[len(operations)].append(size)
                skipped = block
            elif size != FREE:
                births[block] = place, len(sizes)
                operations.append((_ALLOCATE, len(sizes)))
                sizes.append(size)
                blocks.append(block)
            elif block in births:
                born, ordinal = births[block]
                table = _table(born, place, count)
                operations += [] if table is None else [(table, ordinal)]
        by_place = {index: tuple(values) for index, values in temporaries.items()}
        freed = {ordinal for table, ordinal in operations if table == _OWN}
        survivors = tuple(ordinal for ordinal in range(len(sizes)) if ordinal not in freed)
        return _Batch(tuple(operations), tuple(sizes), survivors, tuple(blocks), by_place)


class _Varying:
    """One batch of a step at any length."""

    def __init__(self, lengths: Sequence[int], batches: Sequence[_Batch]) -> None:
        self._count = len(batches[0].sizes)
        self._survivors = batches[0].survivors
        columns = list(zip(*(item.sizes for item in batches), strict=True))
        operations: list[_Operation] = []
        for index, operation in enumerate((*batches[0].operations, None)):
            alternatives = [item.temporaries.get(index, ()) for item in batches]
            for column in zip_longest(*alternatives, fillvalue=0):
                operations.append((_TEMPORARY, len(columns)))
                columns.append(column)
            operations += [operation] if operation else []
        large = [max(column) > SMALL_SIZE_BYTES for column in columns]
        self._operations = tuple(
            item for item in operations if item[0] not in (_ALLOCATE, _OWN, _TEMPORARY) or large[item[1]]
        )
        """Without small blocks, which have a pool of their own."""
        points = torch.tensor(columns, dtype=torch.float64).view(-1, len(lengths))  # [allocations, lengths]
        powers = torch.tensor([[1.0, length, length**2] for length in lengths], dtype=torch.float64)
        self._coefficients = torch.linalg.solve(powers, points.T)
        self._longest, self._most = max(lengths), points.amax(dim=1)
        self._sizes: dict[int, list[int]] = {}

    def play(self, allocator: CachingAllocator, length: int, live: list[_Live], *, opens: bool) -> list[_Live]:
        """Play the batch at a length; take and return the tables of live blocks, the latest first."""
        sizes = self._sizes_at(length)
        own: _Live = [None] * self._count
        previous, two_back, first, first_before, last_before = live
        if opens:
            first, first_before, last_before = [], first, previous
        tables = (own, previous, two_back, first, first_before, last_before)
        for table, index in self._operations:
            if table == _ALLOCATE:
                own[index] = allocator.malloc(sizes[index])
            elif table == _TEMPORARY:
                allocator.free(allocator.malloc(sizes[index]))
            elif table == _EMPTY:
                allocator.empty_cache()
            elif index < len(tables[table]) and (block := tables[table][index]) is not None:
                tables[table][index] = None
                allocator.free(block)
        left = [own[ordinal] for ordinal in self._survivors]
        following = [left, previous, left if opens else first, first_before, last_before]
        _collect(allocator, live, following)
        return following

    def _sizes_at(self, length: int) -> list[int]:
        if length not in self._sizes:
            powers = torch.tensor([1.0, length, length**2], dtype=torch.float64)
            exact = (powers @ self._coefficients).clamp(min=0)
            if length <= self._longest:  # a size that is no polynomial must not grow as the length falls
                exact = torch.minimum(exact, self._most)
            self._sizes[length] = torch.ceil(exact - 0.5).long().tolist()
        return self._sizes[length]


def _collect(allocator: CachingAllocator, tables: list[_Live], following: list[_Live]) -> None:
    """Free the blocks of tables that come to an end: cycles of objects hold them until Python collects its garbage."""
    going_on = {id(table) for table in following}
    for table in tables:
        if id(table) not in going_on:
            for index, block in enumerate(table):
                if block is not None:
                    table[index] = None
                    allocator.free(block)


def _table(born: int, place: int, count: int) -> int | None:
    """Return the table that holds a block of batch `born` while batch `place` runs, with `count` batches a step.

    Return None for a block from long before.
    """
    back = place - born
    if back <= _TWO_BACK:
        return (_OWN, _PREVIOUS, _TWO_BACK)[back]
    steps_back = place // count - born // count
    if born % count == 0 and steps_back <= 1:
        return _FIRST_BEFORE if steps_back else _FIRST
    if born % count == count - 1 and steps_back == 1:
        return _LAST_BEFORE
    return None


def _sized(trace: Trace, profile: DeviceProfile) -> list[Event]:
    """Return the events with the sizes of library calls on a device."""
    calls = [profile.workspace_bytes(call) for call in trace.calls]
    events = []
    for block, size in trace.events:
        index = call_of(size) if block >= 0 else None
        events.append((block, size if index is None else calls[index]))
    return events
