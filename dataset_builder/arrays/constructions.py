"""The constructions of orthogonal arrays, one function each; levels are numbered from 0.

OA(n, f, l, t) has n runs, f columns, l levels and strength t; L36(2^11 3^12) has strength 2 and mixed levels.
"HSS" is Hedayat, Sloane & Stufken, "Orthogonal Arrays: Theory and Applications" (Springer 1999).
"""

from collections.abc import Sequence

import numpy as np

from dataset_builder.arrays import seeds
from dataset_builder.arrays.differences import best_scheme
from dataset_builder.arrays.fields import IntArray, addition, multiplication
from dataset_builder.arrays.geometry import cap, linear_array, projective_points
from dataset_builder.arrays.hadamard import hadamard


def full_factorial(levels: Sequence[int]) -> IntArray:
    """Every combination of levels once: any strength."""
    return np.indices(tuple(levels), dtype=np.int64).reshape(len(levels), -1).T


def rao_hamming(levels: int, k: int) -> IntArray:
    """OA(s^k, (s^k-1)/(s-1), s, 2), s a prime power: all points of PG(k-1, s) (Rao 1947; HSS section 3.4)."""
    return linear_array(levels, projective_points(levels, k))


def bush(levels: int, strength: int) -> IntArray:
    """OA(s^t, s+1, s, t) for a prime power s >= t - 1 (Bush, Ann. Math. Stat. 23, 1952; HSS section 3.2).

    The runs are the polynomials of degree below t: their values at all elements, and their leading
    coefficient. For s even and t = 3 the middle coefficient can be added: OA(s^3, s+2, s, 3).
    """
    if levels < strength - 1:
        raise ValueError(
            f"expected {strength - 1} levels or more for an array of strength {strength}, found {levels}: "
            "ask for more levels or less strength"
        )
    points = np.ones((levels, strength), dtype=np.int64)
    for i in range(1, strength):
        points[:, i] = multiplication(levels)[points[:, i - 1], np.arange(levels)]
    rest = [[0] * (strength - 1) + [1]]
    if strength == 3 and levels % 2 == 0:
        rest.append([0, 1, 0])
    return linear_array(levels, np.vstack([points, rest]))


def developed(scheme: IntArray, levels: int, tail: IntArray) -> IntArray:
    """OA(r s, s^c and the columns of the tail, 2) from D(r, c, s) and an array of strength 2 with r runs.

    Each row of the scheme gives s runs, one for each element added to it; the tail is the same in all of them
    (Bose & Bush 1952; Wang & Wu, J. Amer. Stat. Assoc. 86, 1991; HSS chapters 6 and 9).
    """
    sums = addition(levels)[scheme[:, None, :], np.arange(levels)[None, :, None]]
    return np.hstack([sums.reshape(len(scheme) * levels, scheme.shape[1]), np.repeat(tail, levels, axis=0)])


def addelman_kempthorne(levels: int, k: int) -> IntArray:
    """OA(2 s^k, 2(s^k-1)/(s-1) - 1, s, 2) for an odd prime power s.

    The parameters of Addelman & Kempthorne (Ann. Math. Stat. 32, 1961; HSS section 3.3), here by developing
    D(2 s^(k-1), 2 s^(k-1), s) over the array for k - 1.
    """
    if levels % 2 == 0:
        raise ValueError(f"expected an odd prime power, found {levels} levels: use Rao-Hamming arrays of even order")
    array = (np.arange(2 * levels) % levels)[:, None]
    for i in range(1, k):
        array = developed(best_scheme(2 * levels**i, levels).build(), levels, array)
    return array


def hadamard_array(order: int) -> IntArray:
    """OA(4m, 4m-1, 2, 2): a normalised Hadamard matrix less its first column (HSS theorem 7.5)."""
    return (1 - hadamard(order)[:, 1:]) // 2


def fold_over(array: IntArray) -> IntArray:
    """OA(2n, f+1, 2, 3) from OA(n, f, 2, 2): the array above its complement (Seiden 1954; HSS chapter 2)."""
    marker = np.repeat([[0], [1]], len(array), axis=0)
    return np.hstack([marker, np.vstack([array, 1 - array])])


def hadamard_with_four(order: int, tail: IntArray, column: int) -> IntArray:
    """OA(2r, 4^1 2^(r-2) and the tail less a column, 2) from a Hadamard matrix and a tail of r rows each.

    In the developed matrix the tail's two-level `column` x, the plain sign and their product are three
    columns that make up one of four levels (contractive replacement), once x is also a column of the
    Hadamard matrix: its rows are put in the order that makes it so.
    """
    half = (1 - hadamard(order)) // 2
    x = tail[:, column]
    rows = np.empty(order, dtype=np.int64)
    rows[np.argsort(x, kind="stable")] = np.argsort(half[:, 1], kind="stable")
    sign = np.tile([0, 1], order)
    rest = np.delete(tail, column, axis=1)
    array = developed(half[rows][:, 2:], 2, rest)
    return np.hstack([(2 * np.repeat(x, 2) + sign)[:, None], array])


def cap_array(levels: int, k: int) -> IntArray:
    """OA(s^k, f, s, 3) with the f points of a cap of PG(k-1, s): see `geometry.cap` for its size."""
    return linear_array(levels, cap(levels, k))


def expanded(array: IntArray, column: int, inner: IntArray) -> IntArray:
    """A column of m levels replaced by an array with m runs (expansive replacement; HSS chapter 9)."""
    return np.hstack([array[:, :column], inner[array[:, column]], array[:, column + 1 :]])


def direct_product(first: IntArray, second: IntArray) -> IntArray:
    """Every run of the one with every run of the other, side by side: the lesser of the two strengths."""
    return np.hstack([np.repeat(first, len(second), axis=0), np.tile(second, (len(first), 1))])


def kronecker_product(first: IntArray, second: IntArray, second_levels: int) -> IntArray:
    """OA(n1 n2, min(f1, f2), l1 l2, t): a column of the one and one of the other make one (Bush 1952)."""
    columns = min(first.shape[1], second.shape[1])
    pairs = first[:, None, :columns] * second_levels + second[None, :, :columns]
    return pairs.reshape(-1, columns)


def taguchi_18() -> IntArray:
    """L18(2^1 3^7): D(6, 6, 3) over the full factorial 2 x 3 (columns here: 3^6, 2, 3)."""
    return developed(best_scheme(6, 3).build(), 3, full_factorial([2, 3]))


def taguchi_18_with_six() -> IntArray:
    """L18(3^6 6^1): D(6, 6, 3) over a single column of six levels, which comes last."""
    return developed(best_scheme(6, 3).build(), 3, full_factorial([6]))


def taguchi_36(tail: IntArray | None = None) -> IntArray:
    """L36(3^12 and the tail), by default L36(2^11 3^12): Seiden's D(12, 12, 3) over any array of 12 runs."""
    return developed(best_scheme(12, 3).build(), 3, hadamard_array(12) if tail is None else tail)


def twelve_run_tails() -> dict[str, IntArray]:
    """The arrays of 12 runs over which L24, L36 and L48 can be developed, by their notation."""
    return {
        "L12(2^11)": hadamard_array(12),
        "L12(2^4 3^1)": seeds.block_array(12),
        "L12(2^2 6^1)": developed(best_scheme(6, 2).build(), 2, full_factorial([6])),
        "L12(3^1 4^1)": full_factorial([3, 4]),
        "L12(12^1)": full_factorial([12]),
    }


def taguchi_50() -> IntArray:
    """L50(2^1 5^11): D(10, 10, 5) over the full factorial 2 x 5 (columns here: 5^10, 2, 5)."""
    return developed(best_scheme(10, 5).build(), 5, full_factorial([2, 5]))


def taguchi_54() -> IntArray:
    """L54(2^1 3^25): D(18, 18, 3) over L18(2^1 3^7) (columns here: 3^18, 3^6, 2, 3)."""
    return developed(best_scheme(18, 3).build(), 3, taguchi_18())
