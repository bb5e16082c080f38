"""Counts whether an array is orthogonal, and how far from it if it is not.

Nothing is taken on trust from a construction: every choice of t columns is counted, for every t up to the strength.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np
import numpy.typing as npt

from dataset_builder.arrays.fields import IntArray

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
        table = f"{self.runs} runs x {self.factors} factors"
        if self.exact:
            return f"{table}: exact orthogonal array of strength {self.strength}"
        columns = ", ".join(str(column) for column in self.worst_columns)
        return (
            f"{table}: strength {self.strength_reached} of {self.strength}; worst off by "
            f"{self.worst_deviation:.0%} (columns {columns}); {self.coverage:.1%} of the level tuples occur; "
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
        proportional=_proportional(table, counts),
        sizes=sizes,
    )


def _checked(array: npt.ArrayLike, levels: Sequence[int], strength: int) -> tuple[IntArray, list[int]]:
    table = np.asarray(array)
    counts = [operator.index(level) for level in levels]
    if strength < 1:
        raise ValueError(f"expected a strength of at least 1, found {strength}: ask for 1, 2 or 3")
    if table.ndim != 2 or not table.size or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"expected a matrix of integers with runs and columns, found shape {table.shape} of {table.dtype}: "
            "give the levels of each run as a row"
        )
    if table.shape[1] != len(counts):
        raise ValueError(
            f"expected one level count for each column, found {len(counts)} for {table.shape[1]} columns: give as many"
        )
    if (table < 0).any() or (table >= np.array(counts)).any():
        raise ValueError(
            "expected each column j to hold 0..levels[j]-1, found a value outside: renumber the levels from 0"
        )
    return table.astype(np.int64), counts


def _size_balance(table: IntArray, levels: list[int], size: int) -> SizeBalance:
    worst, worst_columns, exact, seen, total = 0.0, (), True, 0, 0
    place: tuple[int, ...]
    for place, counts in _tuple_counts(table, levels, size):
        expected = len(table) / len(counts)
        low, high = int(counts.min()), int(counts.max())
        exact = exact and low == high
        deviation = max(high - expected, expected - low) / expected
        if low != high and deviation > worst:
            worst, worst_columns = deviation, place
        seen += int(np.count_nonzero(counts))
        total += len(counts)
    return SizeBalance(size, exact, worst, worst_columns, seen / total)


def _tuple_counts(table: IntArray, levels: list[int], size: int) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """For each choice of columns how often each tuple of their levels occurs, the last column running fastest."""
    columns = range(len(levels))
    for head in combinations(columns, size - 1):
        code = np.zeros(len(table), dtype=np.int64)
        for column in head:
            code = code * levels[column] + table[:, column]
        cells = prod(levels[column] for column in head)
        last = columns[(head[-1] + 1 if head else 0) :]
        chunk = max(1, _CELLS_AT_ONCE // len(table))
        for start in range(0, len(last), chunk):
            yield from _with_last(table, levels, head, code, cells, last[start : start + chunk])


def _with_last(
    table: IntArray, levels: list[int], head: tuple[int, ...], code: IntArray, cells: int, last: range
) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """One count for all the choices that share all columns but the last: many times quicker than one by one."""
    widths = np.array([levels[column] for column in last])
    ends = np.cumsum(cells * widths)
    starts = ends - cells * widths
    codes = code[:, None] * widths + table[:, last.start : last.stop] + starts
    counts = np.bincount(codes.ravel(), minlength=int(ends[-1]))
    for column, start, end in zip(last, starts, ends, strict=True):
        yield (*head, column), counts[start:end]


def _proportional(table: IntArray, levels: list[int]) -> bool:
    single = [np.bincount(table[:, j], minlength=level) for j, level in enumerate(levels)]
    if len(levels) < 2:
        return True
    return all(
        np.array_equal(counts * len(table), np.outer(single[i], single[j]).ravel())
        for (i, j), counts in _tuple_counts(table, levels, 2)
    )
