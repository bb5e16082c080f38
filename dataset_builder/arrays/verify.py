"""Counts whether an array is orthogonal, and how far from it if it is not.

Nothing is taken on trust from a construction: every choice of t columns is counted, for all t up to the
strength.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vramcast.dataset_builder.arrays.fields import IntArray

_CELLS_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class SizeBalance:
    """How often the level tuples of all choices of `size` columns occur."""

    size: int
    exact: bool
    worst_deviation: float
    """Largest |count - expected| / expected."""
    worst_columns: tuple[int, ...]
    """The first columns at which the worst deviation is met; empty if there is none."""
    coverage: float
    """Share of the level tuples that occur at least once."""


@dataclass(frozen=True)
class Balance:
    """What `verify` found; the fields without a size speak of choices of `strength` columns."""

    runs: int
    factors: int
    strength: int
    """The strength asked for, but never more than there are factors."""
    strength_reached: int
    exact: bool
    worst_deviation: float
    worst_columns: tuple[int, ...]
    coverage: float
    proportional: bool
    """Whether each pair of columns is independent: main effects can then be told apart even if not exact.

    The condition of proportional frequencies: Addelman, Technometrics 4 (1962).
    """
    sizes: tuple[SizeBalance, ...]
    """The same for 1, 2, ... columns at a time."""

    def __str__(self) -> str:
        return self.told()

    def told(self, names: Sequence[str] | None = None) -> str:
        """What was found, in a line; `names` are those of the columns."""
        table = f"{self.runs} runs x {self.factors} factors"
        if self.exact:
            return f"{table}: exact orthogonal array of strength {self.strength}"
        columns = " x ".join(names[column] if names else f"column {column}" for column in self.worst_columns)
        return (
            f"{table}: strength {self.strength_reached} of {self.strength}; worst off by "
            f"{self.worst_deviation:.0%} ({columns}); {self.coverage:.1%} of the level tuples occur; "
            f"frequencies {'' if self.proportional else 'not '}proportional"
        )


def verify(array: npt.ArrayLike, levels: Sequence[int], strength: int = 2) -> Balance:
    """Counts every tuple of levels in every choice of up to `strength` columns."""
    table, counts = _checked(array, levels, strength)
    asked = min(strength, len(counts))
    sizes = tuple(_size_balance(table, counts, size) for size in range(1, asked + 1))
    reached = next((found.size - 1 for found in sizes if not found.exact), asked)
    last = sizes[-1]
    return Balance(
        runs=len(table),
        factors=len(counts),
        strength=asked,
        strength_reached=reached,
        exact=reached == asked,
        worst_deviation=last.worst_deviation,
        worst_columns=last.worst_columns,
        coverage=last.coverage,
        proportional=(len(sizes) > 1 and sizes[1].exact) or _proportional(table, counts),
        sizes=sizes,
    )


def _checked(array: npt.ArrayLike, levels: Sequence[int], strength: int) -> tuple[IntArray, list[int]]:
    table = np.asarray(array)
    counts = [operator.index(level) for level in levels]
    if strength < 1:
        raise ValueError(f"expected a strength of at least 1, found {strength}: ask for 1, 2 or 3")
    if table.ndim != 2 or not table.size or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"expected a matrix of integers, found {table.dtype} of shape {table.shape}: "
            "give the levels of each run as a row"
        )
    if table.shape[1] != len(counts):
        raise ValueError(
            f"expected one level count for each of the {table.shape[1]} columns, found {len(counts)}: give as many"
        )
    if (table < 0).any() or (table >= np.array(counts)).any():
        raise ValueError(
            "expected each column j to hold 0..levels[j]-1, found a value outside: renumber the levels from 0"
        )
    return table.astype(np.int64), counts


class _Batch(NamedTuple):
    """The counts for all the choices of columns that share all columns but the last."""

    head: tuple[int, ...]
    last: range
    counts: IntArray
    """How often each tuple of levels occurs, the last column running fastest, one choice after the other."""
    starts: IntArray
    cells: IntArray
    """Where in the counts each choice begins, and how many tuples it has."""


def _size_balance(table: IntArray, levels: list[int], size: int) -> SizeBalance:
    worst, exact, seen, total = 0.0, True, 0, 0
    place: tuple[int, ...] = ()
    for batch in _batches(table, levels, size):
        low = np.minimum.reduceat(batch.counts, batch.starts)
        high = np.maximum.reduceat(batch.counts, batch.starts)
        expected = len(table) / batch.cells
        # Equal counts are exact: no rounding of the expected count may say otherwise.
        deviation = np.where(low == high, 0.0, np.maximum(high - expected, expected - low) / expected)
        exact = exact and bool((low == high).all())
        if deviation.max() > worst:
            worst, place = float(deviation.max()), (*batch.head, batch.last[int(deviation.argmax())])
        seen += int(np.count_nonzero(batch.counts))
        total += len(batch.counts)
    return SizeBalance(size, exact, worst, place, seen / total)


def _batches(table: IntArray, levels: list[int], size: int) -> Iterator[_Batch]:
    columns = range(len(levels))
    chunk = max(1, _CELLS_AT_ONCE // len(table))
    for head in combinations(columns, size - 1):
        code = np.zeros(len(table), dtype=np.int64)
        for column in head:
            code = code * levels[column] + table[:, column]
        last = columns[(head[-1] + 1 if head else 0) :]
        for start in range(0, len(last), chunk):
            yield _batch(table, levels, head, code, last[start : start + chunk])


def _batch(table: IntArray, levels: list[int], head: tuple[int, ...], code: IntArray, last: range) -> _Batch:
    """One count for many choices at once: many times quicker than one by one."""
    widths = np.array([levels[column] for column in last])
    cells = prod(levels[column] for column in head) * widths
    starts = np.cumsum(cells) - cells
    codes = code[:, None] * widths + table[:, last.start : last.stop] + starts
    return _Batch(head, last, np.bincount(codes.ravel(), minlength=int(cells.sum())), starts, cells)


def _proportional(table: IntArray, levels: list[int]) -> bool:
    single = [np.bincount(table[:, j], minlength=level) for j, level in enumerate(levels)]
    if len(levels) < 2:
        return True
    return all(
        np.array_equal(
            batch.counts * len(table),
            np.concatenate([np.outer(single[batch.head[0]], single[j]).ravel() for j in batch.last]),
        )
        for batch in _batches(table, levels, 2)
    )
