"""Verifies by counting whether an array is orthogonal, and how far from balanced it is otherwise.

Constructions are not trusted: every choice of t columns is counted, for all t up to the strength.
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
    """The balance of the level tuples in all choices of `size` columns."""

    size: int
    exact: bool
    worst_deviation: float
    """Largest |count - expected| / expected."""
    worst_columns: tuple[int, ...]
    """The first columns with the worst deviation; empty if there is none."""
    coverage: float
    """Share of the level tuples that occur at least once."""


@dataclass(frozen=True)
class Balance:
    """The result of `verify`; the fields without a size refer to choices of `strength` columns."""

    runs: int
    factors: int
    strength: int
    """The requested strength, at most the number of factors."""
    strength_reached: int
    exact: bool
    worst_deviation: float
    worst_columns: tuple[int, ...]
    coverage: float
    proportional: bool
    """Each pair of columns is independent, so that main effects can be separated even if not exact.

    The condition of proportional frequencies: Addelman, Technometrics 4 (1962).
    """
    sizes: tuple[SizeBalance, ...]
    """The same for 1, 2, ... columns at a time."""

    def __str__(self) -> str:
        return self.describe()

    def describe(self, names: Sequence[str] | None = None) -> str:
        """Describe the balance in one line; `names` are the names of the columns."""
        table = f"{self.runs} runs x {self.factors} factors"
        if self.exact:
            return f"{table}: exact orthogonal array of strength {self.strength}"
        columns = " x ".join(names[column] if names else f"column {column}" for column in self.worst_columns)
        return (
            f"{table}: {self.occurrence()}, with frequencies up to {self.worst_deviation:.0%} from equal ({columns})"
            f"{', all proportional' if self.proportional else ''}; exact up to strength {self.strength_reached}"
        )

    def occurrence(self) -> str:
        """Say how many of the combinations of levels of `strength` columns occur, and whether equally often."""
        share = "all" if self.coverage == 1 else f"{self.coverage:.1%} of all"
        tuples = {1: "levels", 2: "pairs of levels"}.get(self.strength, f"sets of {self.strength} levels")
        return f"{share} {tuples} occur{' equally often' if self.exact else ''}"


def verify(array: npt.ArrayLike, levels: Sequence[int], strength: int = 2) -> Balance:
    """Count every tuple of levels in every choice of up to `strength` columns."""
    table, counts = _checked(array, levels, strength)
    highest = min(strength, len(counts))
    sizes = tuple(_size_balance(table, counts, size) for size in range(1, highest + 1))
    reached = next((item.size - 1 for item in sizes if not item.exact), highest)
    last = sizes[-1]
    return Balance(
        runs=len(table),
        factors=len(counts),
        strength=highest,
        strength_reached=reached,
        exact=reached == highest,
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
        raise ValueError(f"expected a strength of at least 1, found {strength}: use 1, 2 or 3")
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
    """The counts for all choices of columns that differ only in the last column."""

    head: tuple[int, ...]
    last: range
    counts: IntArray
    """Count of each tuple of levels, the last column varying fastest, one choice after the other."""
    starts: IntArray
    cells: IntArray
    """Start of each choice in `counts`, and its number of tuples."""


def _size_balance(table: IntArray, levels: list[int], size: int) -> SizeBalance:
    worst, exact, seen, total = 0.0, True, 0, 0
    place: tuple[int, ...] = ()
    for batch in _batches(table, levels, size):
        low = np.minimum.reduceat(batch.counts, batch.starts)
        high = np.maximum.reduceat(batch.counts, batch.starts)
        expected = len(table) / batch.cells
        # Equal counts are exact, however the expected count is rounded.
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
    """Count many choices at once, which is much faster than one by one."""
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
