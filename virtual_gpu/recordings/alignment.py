"""A recording beside a simulated run of the same script: the allocations of both in order, and their differences.

Sizes are compared after rounding. The recorded history may be a part of the run: its place is where most of its
sequences of 12 sizes occur. From there on both are aligned by the shortest edit script (E. Myers, An O(ND) difference
algorithm and its variations, 1986). A long one is found in parts: after a number of edits the path that reached
furthest is kept, so that the time is bounded.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from vramcast.virtual_gpu.allocator.allocator import CachingAllocator
from vramcast.virtual_gpu.recordings import places
from vramcast.virtual_gpu.recordings.agreement import allocated_over_time
from vramcast.virtual_gpu.recordings.recording import Action, DeviceRecording, Recording
from vramcast.virtual_gpu.recordings.rewinding import reserved_over_time

GRAM = 12
MOST_EDITS = (2_500, 2_500)
"""In the first parts of a path."""
_LATER_EDITS = 300
_MOST_GRAMS = 1_500
_MOST_PLACES = 400
"""The most places of one sequence of sizes."""
_MOST_CANDIDATES = 24
_COMPARED = 3_000
"""Allocations that decide between places."""


@dataclass(frozen=True)
class AllocationStream:
    """The allocations of a device, with the memory over its events."""

    sizes: tuple[int, ...]
    """Rounded."""
    events: tuple[int, ...]
    """The event of each allocation."""
    stacks: tuple[int, ...]
    allocated: Sequence[int]
    """Bytes of blocks after each event, from the replay."""
    reserved: Sequence[int]


@dataclass(frozen=True)
class Difference:
    """Allocations that one side has and the other lacks."""

    operator: str
    line: str
    count: int
    size_bytes: int


@dataclass(frozen=True)
class Alignment:
    """The result of a comparison."""

    recorded: int
    """Allocations of the recording."""
    equal: int
    first: int
    """The simulated allocation that the recording begins at."""
    missing: tuple[Difference, ...]
    """Recorded, but not simulated."""
    surplus: tuple[Difference, ...]
    """Simulated, but not recorded."""
    recorded_allocated_bytes: int
    """The peak over the recorded part."""
    simulated_allocated_bytes: int
    recorded_reserved_bytes: int
    simulated_reserved_bytes: int

    @property
    def allocated_error(self) -> float:
        """Relative error of the allocated peak."""
        return self.simulated_allocated_bytes / max(self.recorded_allocated_bytes, 1) - 1

    @property
    def reserved_error(self) -> float:
        """Relative error of the reserved peak."""
        return self.simulated_reserved_bytes / max(self.recorded_reserved_bytes, 1) - 1


def stream_of(recording: Recording, device: DeviceRecording, name: str) -> AllocationStream:
    """Return the allocations of a device; blocks have the sizes that the allocator gives them."""
    round_size = CachingAllocator(None, recording.options).round_size
    allocations = [
        (round_size(event.size_bytes), index, event.stack)
        for index, event in enumerate(device.events)
        if event.action is Action.ALLOC
    ]
    return AllocationStream(
        sizes=tuple(size for size, _, _ in allocations),
        events=tuple(event for _, event, _ in allocations),
        stacks=tuple(stack for _, _, stack in allocations),
        allocated=allocated_over_time(device, recording.options, name),
        reserved=reserved_over_time(device),
    )


def align(recorded: tuple[Recording, AllocationStream], simulated: tuple[Recording, AllocationStream]) -> Alignment:
    """Find the recorded part in a simulated run and compare both there."""
    (one, left), (other, right) = recorded, simulated
    first = _place(left.sizes, right.sizes)
    pairs, end = _matches(left.sizes, right.sizes, first)
    matched_left, matched_right = {i for i, _ in pairs}, {j for _, j in pairs}
    missing = _differences(one, left, [i for i in range(len(left.sizes)) if i not in matched_left])
    surplus = _differences(other, right, [j for j in range(first, end) if j not in matched_right])
    span = slice(*_events(right, first, end))
    return Alignment(
        recorded=len(left.sizes),
        equal=len(pairs),
        first=first,
        missing=missing,
        surplus=surplus,
        recorded_allocated_bytes=max(left.allocated, default=0),
        simulated_allocated_bytes=max(right.allocated[span], default=0),
        recorded_reserved_bytes=max(left.reserved, default=0),
        simulated_reserved_bytes=max(right.reserved[span], default=0),
    )


def _events(stream: AllocationStream, first: int, end: int) -> tuple[int, int]:
    """Return the events from the first allocation of a part up to the one behind it."""
    if first >= len(stream.events):
        return 0, 0
    last = stream.events[end] if end < len(stream.events) else len(stream.allocated)
    return stream.events[first], last


def _place(recorded: Sequence[int], simulated: Sequence[int]) -> int:
    """Return where a recording begins in a simulated run; of equally good places the last whole one."""
    if len(recorded) < GRAM or len(simulated) <= len(recorded) // 2:
        return 0
    grams: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place in range(len(simulated) - GRAM + 1):
        grams[tuple(simulated[place : place + GRAM])].append(place)
    step = max((len(recorded) - GRAM) // _MOST_GRAMS, 1)
    votes = _votes(recorded, grams, range(0, len(recorded) - GRAM + 1, step))
    if not votes:
        return 0
    most = max(votes.values())
    whole = [place for place, count in votes.items() if count >= 0.9 * most]
    inside = [place for place in whole if place + len(recorded) <= len(simulated)]
    place = max(inside or whole)
    # Differences on the way shift later votes: the beginning decides within a twentieth.
    reach = max(len(recorded) // 20, 50)
    for starts in (40, 300):
        first = _votes(recorded, grams, range(min(starts, len(recorded) - GRAM + 1)))
        near = [item for item, count in first.items() if count >= 0.7 * max(first.values(), default=0)]
        near = sorted((item for item in near if item >= 0 and abs(item - place) <= reach), key=lambda n: abs(n - place))
        if near:
            return _best_place(recorded[: 2 * reach + _COMPARED], simulated, near[:_MOST_CANDIDATES])
    return max(place, 0)


def _best_place(recorded: Sequence[int], simulated: Sequence[int], candidates: Sequence[int]) -> int:
    """Return the place with the fewest differences: layers that are alike make several places look the same."""
    if len(candidates) == 1:
        return candidates[0]

    def differences(place: int) -> int:
        pairs, end = _matches(recorded, simulated, place)
        return len(recorded) - len(pairs) + end - place - len(pairs)

    return min(candidates, key=differences)


def _votes(
    recorded: Sequence[int], grams: Mapping[tuple[int, ...], Sequence[int]], starts: Iterable[int]
) -> Counter[int]:
    """Return how many sequences of sizes fit each place of the recording in the run."""
    votes: Counter[int] = Counter()
    for start in starts:
        places_of_gram = grams.get(tuple(recorded[start : start + GRAM]), ())
        if len(places_of_gram) <= _MOST_PLACES:
            votes.update(place - start for place in places_of_gram)
    return votes


def _matches(left: Sequence[int], right: Sequence[int], first: int) -> tuple[list[tuple[int, int]], int]:
    """Return equal pairs from `first` on, and the end of the simulated part: where the recording ends."""
    pairs: list[tuple[int, int]] = []
    i, j = 0, first
    for most_edits in chain(MOST_EDITS, repeat(_LATER_EDITS)):
        path = _edit_path(left, right, i, j, most_edits)
        pairs += path.pairs
        i, j = path.end
        if path.done or i >= len(left) or j >= len(right):
            break
    return pairs, pairs[-1][1] + 1 if pairs else first


@dataclass(frozen=True)
class _Path:
    pairs: list[tuple[int, int]]
    end: tuple[int, int]
    done: bool


def _edit_path(left: Sequence[int], right: Sequence[int], i: int, j: int, most_edits: int) -> _Path:
    """Return the shortest path from (i, j) that uses up `left`, or the one that reached furthest within the edits.

    The rest of `right` is free: the simulated run may go on.
    """
    rows, columns = len(left) - i, len(right) - j
    middle = most_edits + 1
    furthest = [0] * (2 * middle + 1)
    history: list[list[int]] = []
    best = (-1, 0, 0)
    """Sum of both coordinates, number of edits, diagonal."""
    for edits in range(most_edits + 1):
        history.append(furthest[middle - edits - 1 : middle + edits + 2])
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(furthest, middle, edits, diagonal)
            y = x - diagonal
            while x < rows and y < columns and left[i + x] == right[j + y]:
                x, y = x + 1, y + 1
            furthest[middle + diagonal] = x
            if y <= columns and x <= rows:
                best = max(best, (x + y, edits, diagonal))
            if x >= rows:
                return _Path(_walk(history, edits, diagonal, x, (i, j)), (i + rows, j + min(y, columns)), True)
    total, edits, diagonal = best
    x = (total + diagonal) // 2
    return _Path(_walk(history, edits, diagonal, x, (i, j)), (i + x, j + x - diagonal), False)


def _step(furthest: Sequence[int], middle: int, edits: int, diagonal: int) -> int:
    """Return the row where the last edit towards a diagonal ends: one of `right` is skipped, or one of `left`."""
    below, above = furthest[middle + diagonal - 1], furthest[middle + diagonal + 1]
    if diagonal == -edits or (diagonal != edits and below < above):
        return above if edits else 0
    return below + 1


def _walk(
    history: Sequence[Sequence[int]], edits: int, diagonal: int, x: int, origin: tuple[int, int]
) -> list[tuple[int, int]]:
    """Walk back along a path and return its equal pairs, in order."""
    pairs: list[tuple[int, int]] = []
    i, j = origin
    for count in range(edits, -1, -1):
        row = history[count]  # rows of the diagonals from -count - 1 to count + 1, before this edit
        start = _step(row, count + 1, count, diagonal)
        while x > start:
            x -= 1
            pairs.append((i + x, j + x - diagonal))
        if count:
            skips_right = diagonal == -count or (
                diagonal != count and row[count + diagonal] < row[count + diagonal + 2]
            )
            diagonal += 1 if skips_right else -1
            x = start if skips_right else start - 1
    return pairs[::-1]


def _differences(recording: Recording, stream: AllocationStream, indices: Sequence[int]) -> tuple[Difference, ...]:
    """Return allocations by operator and line, the largest first."""
    counts: Counter[tuple[str, str]] = Counter()
    totals: Counter[tuple[str, str]] = Counter()
    for index in indices:
        stack = recording.stacks[stream.stacks[index]] if stream.stacks[index] >= 0 else ()
        key = places.operator_of(stack), places.line_of(stack) or "backward pass"
        counts[key] += 1
        totals[key] += stream.sizes[index]
    return tuple(Difference(*key, counts[key], size) for key, size in totals.most_common())
