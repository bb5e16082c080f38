"""Basic constructions for `catalogue` and `strength_three`, one function each; levels are numbered from 0.

OA(n, f, l, t) has n runs, f columns, l levels and strength t; L36(2^11 3^12) has strength 2 and mixed levels.
"HSS" is Hedayat, Sloane & Stufken, "Orthogonal Arrays: Theory and Applications" (Springer 1999).
"""

from collections.abc import Sequence

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray, addition
from vramcast.dataset_builder.arrays.hadamard import hadamard


def full_factorial(levels: Sequence[int]) -> IntArray:
    """Return every combination of levels once: an array of any strength."""
    return np.indices(tuple(levels), dtype=np.int64).reshape(len(levels), -1).T


def developed(scheme: IntArray, levels: int, tail: IntArray) -> IntArray:
    """Return OA(r s, s^c and the columns of the tail, 2) from D(r, c, s) and an array of strength 2 with r runs.

    Each row of the scheme gives s runs, one for each element added to it; all of them share the row of the tail
    (Bose & Bush 1952; Wang & Wu, J. Amer. Stat. Assoc. 86, 1991; HSS chapters 6 and 9).
    """
    sums = addition(levels)[scheme[:, None, :], np.arange(levels)[None, :, None]]
    return np.hstack([sums.reshape(len(scheme) * levels, scheme.shape[1]), np.repeat(tail, levels, axis=0)])


def hadamard_array(order: int) -> IntArray:
    """Return OA(4m, 4m-1, 2, 2): a normalised Hadamard matrix without its first column (HSS theorem 7.5)."""
    return (1 - hadamard(order)[:, 1:]) // 2


def fold_over(array: IntArray) -> IntArray:
    """Return OA(2n, f+1, 2, 3) from OA(n, f, 2, 2): the array above its complement (Seiden 1954; HSS chapter 2)."""
    marker = np.repeat([[0], [1]], len(array), axis=0)
    return np.hstack([marker, np.vstack([array, 1 - array])])


def hadamard_with_four(order: int, tail: IntArray, column: int) -> IntArray:
    """Return OA(2r, 4^1 2^(r-2) and the tail without a column, 2) from a Hadamard matrix and a tail of r rows each.

    In the developed matrix, the tail's two-level `column` x, the sign and their product are three columns that
    contractive replacement turns into one column of four levels. This needs x to be a column of the Hadamard matrix,
    so its rows are reordered accordingly.
    """
    half = (1 - hadamard(order)) // 2
    x = tail[:, column]
    rows = np.empty(order, dtype=np.int64)
    rows[np.argsort(x, kind="stable")] = np.argsort(half[:, 1], kind="stable")
    sign = np.tile([0, 1], order)
    rest = np.delete(tail, column, axis=1)
    array = developed(half[rows][:, 2:], 2, rest)
    return np.hstack([(2 * np.repeat(x, 2) + sign)[:, None], array])
