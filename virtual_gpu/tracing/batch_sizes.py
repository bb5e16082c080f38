"""Traces of one job at many batch sizes: those between two traced ones are computed where a third proves them affine.

Most sizes in a training step are a constant plus a multiple of the batch size. Two traces with the same events give
both for each event, and a third trace between them checks the sum. Where it disagrees, because a kernel changes its
path with the batch, the two halves are checked separately.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from vramcast.virtual_gpu.tracing.trace import Call, Trace

MakeTrace = Callable[[int], Trace]


def traces_by_size(make: MakeTrace, sizes: Sequence[int]) -> Iterator[tuple[int, Trace, bool]]:
    """Yield each size with its trace, and True if the trace was made and not computed.

    Args:
        make: Traces the job with a batch size.
        sizes: Batch sizes, each once, in any order.
    """
    ordered = sorted(sizes)
    made = {size: make(size) for size in dict.fromkeys((ordered[0], ordered[-1]))}
    for size, trace in made.items():
        yield size, trace, True
    yield from _between(make, ordered, made)


def _between(make: MakeTrace, sizes: Sequence[int], ends: dict[int, Trace]) -> Iterator[tuple[int, Trace, bool]]:
    """Yield the sizes inside of a range whose ends are traced."""
    low, high, inner = sizes[0], sizes[-1], sizes[1:-1]
    if not inner:
        return
    at = len(inner) // 2
    middle, trace = inner[at], make(inner[at])
    yield middle, trace, True
    line = AffineTraces.through((low, ends[low]), (high, ends[high]))
    if line is not None and line.holds(middle, trace):
        others = [(size, line.at(size)) for size in inner if size != middle]
        yield from ((size, computed, False) for size, computed in others if computed is not None)
        yield from ((size, make(size), True) for size, computed in others if computed is None)
        return
    traced = {**ends, middle: trace}
    yield from _between(make, sizes[: at + 2], traced)
    yield from _between(make, sizes[at + 1 :], traced)


class AffineTraces:
    """The traces on the line through two traces of one job. Make one with `through`."""

    def __init__(self, sizes: tuple[int, int], traces: tuple[Trace, Trace], events: tuple[Tensor, Tensor]) -> None:
        self._sizes = sizes
        self._low, self._high = traces
        self._blocks: list[int] = events[0][:, 0].tolist()
        self._amounts = events[0][:, 1]
        self._growth = events[1][:, 1] - events[0][:, 1]

    @classmethod
    def through(cls, low: tuple[int, Trace], high: tuple[int, Trace]) -> Self | None:
        """Return the line through two traces with their batch sizes, None if their events differ in more than sizes."""
        (small, first), (large, second) = low, high
        if len(first.events) != len(second.events) or _structure(first) != _structure(second):
            return None
        events = _events(first), _events(second)
        blocks_differ = not torch.equal(events[0][:, 0], events[1][:, 0])
        special = (events[0][:, 1] < 0) | (events[1][:, 1] < 0) | (events[0][:, 0] < 0)
        differs = (special & (events[0][:, 1] != events[1][:, 1])).any()
        return None if blocks_differ or bool(differs) else cls((small, large), (first, second), events)

    def at(self, size: int) -> Trace | None:
        """Return the trace at a batch size, None if a size would not be a whole number."""
        low, high = self._sizes
        scaled = self._growth * (size - low)
        if bool((scaled % (high - low)).any()):
            return None
        amounts = (self._amounts + scaled // (high - low)).tolist()
        share = (size - low, high - low)
        memo: dict[tuple[Call, Call], Any] = {}
        calls = []
        for pair in zip(self._low.calls, self._high.calls, strict=True):
            if pair not in memo:
                memo[pair] = _interpolated(*pair, share)
            calls.append(memo[pair])
        if None in calls:
            return None
        return replace(self._low, events=list(zip(self._blocks, amounts, strict=True)), calls=calls)

    def holds(self, size: int, trace: Trace) -> bool:
        """Return whether a trace lies on the line."""
        if _structure(trace) != _structure(self._low):
            return False
        computed = self.at(size)
        return computed is not None and computed.events == trace.events and computed.calls == trace.calls


def _structure(trace: Trace) -> tuple[Any, ...]:
    """Return all of a trace that does not depend on its batch size if it is affine."""
    kinds = [type(call) for call in trace.calls]
    return (
        trace.uses, kinds, trace.approximations, trace.has_batch_norm, trace.world_size, trace.streams,
        trace.stream_operations,
    )  # fmt: skip


def _events(trace: Trace) -> Tensor:
    return torch.tensor(trace.events, dtype=torch.int64, device="cpu").reshape(-1, 2)


def _interpolated(low: Any, high: Any, share: tuple[int, int]) -> Any:
    """Return the value between two: numbers, sequences of them, or calls with such fields; None if there is none."""
    if low == high:
        return low
    if type(low) is not type(high):
        return None
    if isinstance(low, int) and not isinstance(low, bool):
        scaled = (high - low) * share[0]
        return None if scaled % share[1] else low + scaled // share[1]
    if isinstance(low, tuple):
        items = [_interpolated(*pair, share) for pair in zip(low, high, strict=True)] if len(low) == len(high) else []
        return tuple(items) if items and None not in items else None
    if isinstance(low, Call):
        names = [item.name for item in fields(low) if getattr(low, item.name) != getattr(high, item.name)]
        changes = {name: _interpolated(getattr(low, name), getattr(high, name), share) for name in names}
        return None if None in changes.values() else replace(low, **changes)
    return None
