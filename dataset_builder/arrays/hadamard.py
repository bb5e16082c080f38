"""Hadamard matrices: Sylvester, Paley I and II, one by Williamson, and Kronecker products of these.

Source: Hedayat, Sloane & Stufken, "Orthogonal Arrays" (1999), chapter 7.
"""

from functools import cache

import numpy as np

from vramcast.dataset_builder.arrays import stored_matrices
from vramcast.dataset_builder.arrays.fields import IntArray, divisors, frozen, prime_power, squares, subtraction


def _jacobsthal(order: int) -> IntArray:
    """Return the quadratic character of the difference of two elements of GF(order)."""
    character = np.array([0] + [1 if x in squares(order) else -1 for x in range(1, order)])
    return character[subtraction(order)]


def paley_one(field: int) -> IntArray:
    """Return a matrix of order field + 1 for a prime power = 3 mod 4 (Paley, J. Math. Phys. 12, 1933, lemma 2)."""
    matrix = np.ones((field + 1, field + 1), dtype=np.int64)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = _jacobsthal(field) + np.eye(field, dtype=np.int64)
    return matrix


def paley_two(field: int) -> IntArray:
    """Return a matrix of order 2 (field + 1) for a prime power = 1 mod 4 (Paley 1933, lemma 3)."""
    conference = np.ones((field + 1, field + 1), dtype=np.int64)
    conference[0, 0] = 0
    conference[1:, 1:] = _jacobsthal(field)
    unit = np.eye(field + 1, dtype=np.int64)
    return np.kron(conference, np.array([[1, 1], [1, -1]])) + np.kron(unit, np.array([[1, -1], [-1, -1]]))


def _williamson(rows: IntArray) -> IntArray:
    """Return Williamson's array of four symmetric circulants (Duke Math. J. 11, 1944)."""
    index = np.arange(rows.shape[1])
    shift = np.subtract.outer(index, index) % len(index)
    a, b, c, d = (row[shift] for row in rows)
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def _is_field(order: int, residue: int) -> bool:
    return order % 4 == residue and prime_power(order) is not None


@cache
def hadamard_source(order: int) -> str | None:
    """Return the construction that `hadamard` uses for this order, or None if it has none."""
    if order > 0 and order & (order - 1) == 0:
        return "Sylvester"
    if order < 1 or order % 4:
        return None
    if _is_field(order - 1, 3):
        return "Paley I"
    if _is_field(order // 2 - 1, 1):
        return "Paley II"
    if stored_matrices.williamson_rows(order) is not None:
        return "Williamson"
    factor = _factor(order)
    return f"Kronecker {factor} x {order // factor}" if factor else None


def _factor(order: int) -> int | None:
    """Return the smallest factor such that both it and its cofactor are orders of Hadamard matrices."""
    return next((f for f in divisors(order)[1:-1] if hadamard_source(f) and hadamard_source(order // f)), None)


@cache
def hadamard(order: int) -> IntArray:
    """Return a Hadamard matrix whose first row and column are all +1."""
    source = hadamard_source(order)
    if source is None:
        raise ValueError(f"expected the order of a known Hadamard matrix, found {order}: use another multiple of 4")
    matrix = _build(order, source)
    matrix = matrix * matrix[0]
    return frozen(matrix * matrix[:, :1])


def _build(order: int, source: str) -> IntArray:
    if order == 1:
        return np.ones((1, 1), dtype=np.int64)
    if source == "Paley I":
        return paley_one(order - 1)
    if source == "Paley II":
        return paley_two(order // 2 - 1)
    rows = stored_matrices.williamson_rows(order)
    if rows is not None:
        return _williamson(rows)
    factor = _factor(order) or 2
    if order == 2:
        return np.array([[1, 1], [1, -1]])
    return np.kron(hadamard(factor), hadamard(order // factor))
