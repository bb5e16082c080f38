"""Reduces columns to fewer levels with as little loss of balance as possible.

A column of m levels serves as one of l levels if its levels are merged: Taguchi's dummy levels, Addelman's
collapsing (Technometrics 4, 1962). This keeps the balance if l divides m. Otherwise m mod l levels are surplus.
Renaming a surplus level as a whole would make some levels twice as frequent as others, so each run with a surplus
level gets the level whose pairs are the rarest. Every combination of levels already occurs in the other runs.
"""

from collections.abc import Sequence

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray

_PASSES = 4
_MAX_STEPS = 10_000
_MAX_COUNTS = 20_000_000


def surplus_share(size: int, level: int) -> float:
    """Return the share of runs with a surplus level if a column of `size` levels serves as one of `level`."""
    return size % level / size


def merge_levels(array: IntArray, sizes: Sequence[int], levels: Sequence[int]) -> IntArray:
    """Reduce the columns of an array, which have `sizes` levels, to `levels` levels."""
    largest_multiples = np.array([size - size % level for size, level in zip(sizes, levels, strict=True)])
    surplus = array >= largest_multiples
    table = np.where(surplus, -1, array % np.array(levels))
    cells = np.argwhere(surplus)
    if not len(cells):
        return table
    passes = min(_PASSES, _MAX_STEPS // len(cells))
    if not passes or (len(levels) * max(levels)) ** 2 > _MAX_COUNTS:
        # Too large to count at every step: rename whole levels, which stay independent of other columns.
        merged: IntArray = array % np.array(levels)
        return merged
    assigner = _LevelAssigner(table, levels)
    for i, j in np.tile(cells, (passes, 1)):
        assigner.assign(i, j)
    return table


class _LevelAssigner:
    """Assigns levels to cells one by one and counts all pairs of levels; -1 is a cell without a level."""

    def __init__(self, table: IntArray, levels: Sequence[int]) -> None:
        factors, most = len(levels), max(levels)
        self.table, self.levels = table, levels
        self.columns = np.arange(factors)
        self.weights = np.outer(levels, levels) / len(table)
        self.singles = np.zeros((factors, most), dtype=np.int64)
        self.pairs = np.zeros((factors, factors, most, most), dtype=np.int64)
        for i in range(factors):
            assigned = table[table[:, i] >= 0]
            self.singles[i] = np.bincount(assigned[:, i], minlength=most)
            for j in range(factors):
                both = assigned[assigned[:, j] >= 0]
                np.add.at(self.pairs[i, j], (both[:, i], both[:, j]), 1)

    def assign(self, i: int, j: int) -> None:
        """Assign to one cell the level whose pairs in this run are the rarest."""
        row, level = self.table[i], self.levels[j]
        if row[j] >= 0:
            self._count(i, j, -1)
        row[j] = -1
        assigned = self.columns[row >= 0]
        counts = self.pairs[j, assigned, :level, row[assigned]]
        costs = ((counts * self.weights[j, assigned, None]) ** 2).sum(axis=0)
        # No level becomes more frequent than necessary.
        full = self.singles[j, :level] >= -(-len(self.table) // level)
        row[j] = np.where(full, np.inf, costs).argmin()
        self._count(i, j, 1)

    def _count(self, i: int, j: int, change: int) -> None:
        row = self.table[i]
        assigned = self.columns[(row >= 0) & (self.columns != j)]
        self.singles[j, row[j]] += change
        self.pairs[j, assigned, row[j], row[assigned]] += change
        self.pairs[assigned, j, row[assigned], row[j]] += change
