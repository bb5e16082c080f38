"""Brings columns down to fewer levels, with as little loss of balance as can be.

A column of m levels serves one of l levels if its levels are merged: Taguchi's dummy levels, Addelman's
collapsing (Technometrics 4, 1962). That keeps the balance if l divides m. Otherwise m mod l levels are
surplus. To rename each of these as a whole makes some levels twice as frequent as others; here every single
run that has a surplus level is given the level that it serves best. Whatever that is, each combination of
levels occurs in the other runs already.
"""

from collections.abc import Sequence

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray

_PASSES = 4
_MOST_STEPS = 10_000
_MOST_COUNTS = 20_000_000


def surplus_share(size: int, level: int) -> float:
    """The share of runs whose level is surplus when a column of `size` levels serves one of `level`."""
    return size % level / size


def deal(array: IntArray, sizes: Sequence[int], levels: Sequence[int]) -> IntArray:
    """The array, whose columns have these sizes, brought down to these levels."""
    kept = np.array([size - size % level for size, level in zip(sizes, levels, strict=True)])
    surplus = array >= kept
    table = np.where(surplus, -1, array % np.array(levels))
    cells = np.argwhere(surplus)
    if not len(cells):
        return table
    passes = min(_PASSES, _MOST_STEPS // len(cells))
    if not passes or (len(levels) * max(levels)) ** 2 > _MOST_COUNTS:
        # Too large to count at every step: whole levels are renamed, and stay independent of other columns.
        merged: IntArray = array % np.array(levels)
        return merged
    dealer = _Dealer(table, levels)
    for i, j in np.tile(cells, (passes, 1)):
        dealer.give(i, j)
    return table


class _Dealer:
    """Gives levels to cells one by one, counting all pairs of levels; -1 is a cell that has none yet."""

    def __init__(self, table: IntArray, levels: Sequence[int]) -> None:
        factors, most = len(levels), max(levels)
        self.table, self.levels = table, levels
        self.columns = np.arange(factors)
        self.weights = np.outer(levels, levels) / len(table)
        self.singles = np.zeros((factors, most), dtype=np.int64)
        self.pairs = np.zeros((factors, factors, most, most), dtype=np.int64)
        for i in range(factors):
            known = table[table[:, i] >= 0]
            self.singles[i] = np.bincount(known[:, i], minlength=most)
            for j in range(factors):
                both = known[known[:, j] >= 0]
                np.add.at(self.pairs[i, j], (both[:, i], both[:, j]), 1)

    def give(self, i: int, j: int) -> None:
        """Gives one cell, in place of what it has, the level whose pairs in this run are the rarest."""
        row, level = self.table[i], self.levels[j]
        if row[j] >= 0:
            self._count(i, j, -1)
        row[j] = -1
        known = self.columns[row >= 0]
        counts = self.pairs[j, known, :level, row[known]]
        costs = ((counts * self.weights[j, known, None]) ** 2).sum(axis=0)
        # No level becomes more frequent than it must.
        full = self.singles[j, :level] >= -(-len(self.table) // level)
        row[j] = np.where(full, np.inf, costs).argmin()
        self._count(i, j, 1)

    def _count(self, i: int, j: int, change: int) -> None:
        row = self.table[i]
        known = self.columns[(row >= 0) & (self.columns != j)]
        self.singles[j, row[j]] += change
        self.pairs[j, known, row[j], row[known]] += change
        self.pairs[known, j, row[known], row[j]] += change
