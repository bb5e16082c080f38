"""Orthogonal arrays from projective geometry: linear arrays, caps, and disjoint subspaces.

The runs are all vectors x of GF(s)^k, a column is x -> <x, v>. The strength is t if and only if any t of
the vectors v are independent (Bose, Sankhya 8, 1947; Hedayat, Sloane & Stufken, "Orthogonal Arrays", 1999,
chapters 3 and 5): points of PG(k-1, s) for strength 2, a cap (no three points on a line) for strength 3.
"""

from collections.abc import Sequence
from functools import cache
from math import lcm

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray, addition, field_powers, multiplication, words


def linear_array(field: int, vectors: IntArray) -> IntArray:
    """Return the array whose columns are the linear forms with these vectors (one per row) over GF(field)."""
    add, mul = addition(field), multiplication(field)
    runs = words(field, vectors.shape[1])
    total: IntArray = mul[runs[:, :1], vectors[None, :, 0]]
    for i in range(1, vectors.shape[1]):
        total = add[total, mul[runs[:, i : i + 1], vectors[None, :, i]]]
    return total


def _anisotropic_form(field: int) -> IntArray:
    """Return x^2 + x y + c y^2 for all x and y, with the first c for which it is 0 only at (0, 0)."""
    add, mul = addition(field), multiplication(field)
    square = np.diag(mul)
    for c in range(1, field):
        form: IntArray = add[add[square[:, None], mul], mul[c, square][None, :]]
        if np.count_nonzero(form == 0) == 1:
            return form
    raise AssertionError(f"no anisotropic form over GF({field})")


def _affine_cap(field: int, dimension: int) -> IntArray:
    """Return a cap of AG(dimension, field): 2 points, an oval, or an elliptic quadric without a point.

    The oval x^2 + x y + c y^2 = 1 misses the line at infinity; in even characteristic its nucleus (0, 0)
    can be added (Bose 1947). The quadric z = x^2 + x y + c y^2 is also from Bose.
    """
    if dimension == 1:
        return np.array([[0], [1]])
    form = _anisotropic_form(field)
    if dimension == 3:
        return np.column_stack([words(field, 2), form.ravel()])
    oval = np.argwhere(form == 1)
    return oval if field % 2 else np.vstack([oval, [[0, 0]]])


def _affine_cap_size(field: int, dimension: int) -> int:
    return (2, field + 1 if field % 2 else field + 2, field * field)[dimension - 1]


@cache
def _best_cap(field: int, length: int) -> tuple[int, int]:
    """Return the size of the largest cap of PG(length-1, field) built here, and the dimension of its affine factor."""
    if length <= 4:
        return (_affine_cap_size(field, length - 1) + (1 if length == 4 else 0), 0)
    return max((_affine_cap_size(field, a) * _best_cap(field, length - a)[0], a) for a in (1, 2, 3) if length - a > 2)


def cap_size(field: int, length: int) -> int:
    """Return the number of points of `cap` without building it; the length is at least 3."""
    return int(2 ** (length - 1)) if field == 2 else _best_cap(field, length)[0]


def cap(field: int, length: int) -> IntArray:
    """Return a large cap of PG(length-1, field), one vector per row.

    Field of order 2: all points off a hyperplane. Length 3 and 4: an oval and an elliptic quadric.
    Longer: the product of an affine cap with a projective one (Mukhopadhyay, J. Combin. Theory A 24, 1978).
    """
    if field == 2:
        return np.column_stack([np.ones(2 ** (length - 1), dtype=np.int64), words(2, length - 1)])
    affine = _best_cap(field, length)[1]
    if affine:
        left, right = _affine_cap(field, affine), cap(field, length - affine)
        return np.column_stack([np.repeat(left, len(right), axis=0), np.tile(right, (len(left), 1))])
    points = _affine_cap(field, length - 1)
    points = np.column_stack([np.ones(len(points), dtype=np.int64), points])
    return points if length == 3 else np.vstack([points, [[0, 0, 0, 1]]])


Subspace = tuple[int, ...]
"""A basis of a subspace of GF(p)^k; a vector is encoded as the integer with its digits in base p."""


def subspace_array(prime: int, length: int, subspaces: Sequence[Subspace]) -> IntArray:
    """Return one column of p^m levels for each subspace of dimension m, instead of its (p^m - 1)/(p - 1) columns.

    Contractive replacement (Addelman, Technometrics 4, 1962; Hedayat, Sloane & Stufken 1999, chapter 9): the
    strength is 2 if any two subspaces meet only in 0, and 3 if any three are independent.
    """
    vectors = words(prime, length)
    columns = []
    for basis in subspaces:
        digits = vectors @ vectors[list(basis)].T % prime
        columns.append(digits @ prime ** np.arange(len(basis)))
    return np.column_stack(columns)


def greedy_subspaces(prime: int, length: int, dimensions: Sequence[int], strength: int) -> list[Subspace] | None:
    """Return subspaces of these dimensions, any two (strength 3: any three) independent; None if the search fails.

    The search takes the first vectors that fit. A subspace fits if it meets each earlier one (strength 3: each sum of
    two earlier ones) only in 0. With dimensions all 1 and strength 3 this is a lexicographic cap.
    """
    add = addition(prime**length)
    taken = np.zeros(prime**length, dtype=bool)
    bases: list[Subspace] = []
    spans: list[IntArray] = []
    for dimension in dimensions:
        subspace = _free_subspace(add, taken, prime, dimension)
        if subspace is None:
            return None
        basis, span = subspace
        taken[span] = True
        if strength == 3:
            for other in spans:
                taken[add[np.ix_(span, other)].ravel()] = True
        bases.append(basis)
        spans.append(span)
    return bases


def _free_subspace(add: IntArray, taken: np.ndarray, prime: int, dimension: int) -> tuple[Subspace, IntArray] | None:
    """Return the basis and all vectors of the first subspace in which only 0 is taken."""
    basis: list[int] = []
    span = np.zeros(1, dtype=np.int64)
    for _ in range(dimension):
        free = ~taken
        free[span] = False
        # Taken vectors form whole subspaces and include all their multiples, so checking one coset is enough.
        fits = free & ~taken[add[:, span]].any(axis=1)
        if not fits.any():
            return None
        vector = int(fits.argmax())
        multiple, cosets = 0, [span]
        for _ in range(prime - 1):
            multiple = int(add[multiple, vector])
            cosets.append(add[span, multiple])
        span = np.concatenate(cosets)
        basis.append(vector)
    return tuple(basis), span


def digits_for(prime: int, level: int) -> int:
    """Return the smallest m with p^m >= level."""
    power, m = prime, 1
    while power < level:
        power, m = power * prime, m + 1
    return m


def subfield_classes(prime: int) -> int:
    """Return the number of classes in `subfield_subspaces`."""
    return int((prime**6 - 1) // lcm(prime**3 - 1, prime**2 - 1))


def subfield_subspaces(prime: int, classes: int) -> list[Subspace]:
    """Partition GF(p^6) into multiples of its subfields of p^3 and of p^2 elements, the larger ones first.

    The exponents of a primitive element modulo `subfield_classes` define classes; each class is a union of multiples
    of either subfield (without 0). The first `classes` of them are cut into the larger subspaces.
    """
    powers, total = field_powers(prime, 6), subfield_classes(prime)
    subspaces = []
    for dimension in (3, 2):
        step = len(powers) // (prime**dimension - 1)
        for start in range(step):
            if (start % total < classes) == (dimension == 3):
                subspaces.append(tuple(powers[start + step * i] for i in range(dimension)))
    return subspaces
