"""The constructions of orthogonal arrays, one function each; levels are numbered from 0.

OA(n, f, l, t) has n runs, f columns, l levels and strength t. "HSS" is Hedayat, Sloane & Stufken, "Orthogonal
Arrays: Theory and Applications" (Springer 1999), where all of these are proved.
"""

from collections.abc import Sequence

import numpy as np

from dataset_builder.arrays.differences import best_scheme, double_scheme
from dataset_builder.arrays.fields import IntArray, addition, prime_power
from dataset_builder.arrays.geometry import cap, linear_array, projective_points
from dataset_builder.arrays.hadamard import hadamard


def full_factorial(levels: Sequence[int]) -> IntArray:
    """Every combination of levels once: any strength."""
    return np.indices(tuple(levels), dtype=np.int64).reshape(len(levels), -1).T


def rao_hamming(levels: int, k: int) -> IntArray:
    """OA(s^k, (s^k-1)/(s-1), s, 2) for a prime power s: all points of PG(k-1, s) (Rao 1947; HSS section 3.4)."""
    return linear_array(levels, projective_points(levels, k))


def bush(levels: int, strength: int) -> IntArray:
    """OA(s^t, s+1, s, t) for a prime power s >= t - 1 (Bush, Ann. Math. Stat. 23, 1952; HSS section 3.2).

    The runs are the polynomials of degree below t: their values at all elements, and their leading coefficient. For
    s even and t = 3 the middle coefficient can be added.
    """
    if levels < strength - 1:
        raise ValueError(
            f"expected at least {strength - 1} levels for strength {strength}, found {levels}: use fewer columns"
        )
    points = np.ones((levels, strength), dtype=np.int64)
    for i in range(1, strength):
        points[:, i] = _product(levels, points[:, i - 1], np.arange(levels))
    rest = [[0] * (strength - 1) + [1]]
    if strength == 3 and levels % 2 == 0:
        rest.append([0, 1, 0])
    return linear_array(levels, np.vstack([points, rest]))


def _product(levels: int, a: IntArray, b: IntArray) -> IntArray:
    from dataset_builder.arrays.fields import multiplication

    return multiplication(levels)[a, b]
