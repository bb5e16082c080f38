"""Difference schemes D(r, c, s): in the difference of any two columns every element occurs r / s times.

The group of order s is the one of `fields.addition`. D(r, c, s) and any array with r runs give an array with r s
runs (see `constructions.developed`); nearly all mixed arrays are built this way. Sources:
Bose & Bush, Ann. Math. Stat. 23 (1952); Hedayat, Sloane & Stufken, "Orthogonal Arrays" (1999), chapter 6.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from vramcast.dataset_builder.arrays import stored_matrices
from vramcast.dataset_builder.arrays.fields import (
    IntArray,
    addition,
    divisors,
    inverse,
    multiplication,
    prime_factors,
    prime_power,
    squares,
    subtraction,
)
from vramcast.dataset_builder.arrays.hadamard import hadamard, hadamard_source

LARGEST_FIELD = 1024
MAX_STACKED = 256
"""Most rows per level of a stacked scheme: stacking tries all splits, which is slow."""


@dataclass(frozen=True)
class Scheme:
    """The size of a difference scheme, and a function that builds it."""

    rows: int
    columns: int
    levels: int
    build: Callable[[], IntArray]

    def __str__(self) -> str:
        return f"D({self.rows}, {self.columns}, {self.levels})"


def field_scheme(rows: int, levels: int) -> IntArray:
    """Return D(p^m, p^m, p^n): the last n digits of each entry of the multiplication table of GF(p^m)."""
    return multiplication(rows) % levels


def double_scheme(levels: int) -> IntArray:
    """Return D(2s, 2s, s) for an odd prime power s (Jungnickel, Math. Z. 167, 1979), as four quadratic forms.

    Two columns of one half differ by a linear function of the row in each half: every element occurs once. Columns
    of different halves differ by i^2 + ... in the upper half and by g i^2 + ... in the lower one, g not a square.
    The other terms make the first a square and the second g times a square, plus the same constant: together every
    element occurs twice.
    """
    mul, add, sub = multiplication(levels), addition(levels), subtraction(levels)
    non_square = next(x for x in range(2, levels) if x not in squares(levels))
    two = int(add[1, 1])
    quarter = inverse(levels, int(mul[two, two]))
    left = int(mul[quarter, sub[1, inverse(levels, non_square)]])
    right = int(mul[quarter, sub[non_square, 1]])
    square, scaled = np.diag(mul), mul[non_square, np.arange(levels)]
    upper_right = add[mul, square[:, None]]
    lower_left = add[mul, mul[left, square][None, :]]
    lower_right = add[add[mul[:, scaled], scaled[square][:, None]], mul[right, square][None, :]]
    return np.block([[mul, upper_right], [lower_left, lower_right]])


def kronecker_scheme(first: IntArray, second: IntArray, levels: int) -> IntArray:
    """Return D(r1 r2, c1 c2, s) from two schemes on the same group: all sums of two entries."""
    size = (len(first) * len(second), first.shape[1] * second.shape[1])
    return addition(levels)[first[:, None, :, None], second[None, :, None, :]].reshape(size)


def product_scheme(first: IntArray, second: IntArray, second_levels: int) -> IntArray:
    """Return D(r1 r2, min(c1, c2), s1 s2) on the product of the groups."""
    columns = min(first.shape[1], second.shape[1])
    pairs = first[:, None, :columns] * second_levels + second[None, :, :columns]
    return pairs.reshape(-1, columns)


def stacked_scheme(first: IntArray, second: IntArray) -> IntArray:
    """Return D(r1 + r2, min(c1, c2), s): one scheme above the other."""
    columns = min(first.shape[1], second.shape[1])
    return np.vstack([first[:, :columns], second[:, :columns]])


def pair_scheme(rows: int, levels: int) -> IntArray:
    """Return D(r, 2, s), which exists if s divides r: a column of zeros, and one of all elements in turn."""
    return np.column_stack([np.zeros(rows, dtype=np.int64), np.arange(rows) % levels])


@cache
def best_scheme(rows: int, levels: int) -> Scheme:
    """Return the scheme with the most columns that can be built here."""
    if rows % levels:
        return Scheme(rows, 1, levels, lambda: np.zeros((rows, 1), dtype=np.int64))
    direct = max(_direct(rows, levels), key=lambda scheme: scheme.columns)
    if direct.columns == rows:
        return direct
    derived = [*_kronecker(rows, levels), *_product(rows, levels), *_quotient(rows, levels)]
    return max([direct, *derived, *_stacked(rows, levels)], key=lambda scheme: scheme.columns)


def _direct(rows: int, levels: int) -> Iterator[Scheme]:
    yield Scheme(rows, min(rows, 2), levels, lambda: pair_scheme(rows, levels)[:, : min(rows, 2)])
    stored = stored_matrices.stored_scheme(rows, levels)
    if stored is not None:
        yield Scheme(rows, stored.shape[1], levels, lambda: stored)
    if levels == 2 and hadamard_source(rows):
        yield Scheme(rows, rows, 2, lambda: (1 - hadamard(rows)) // 2)
    power = prime_power(levels)
    if power and rows == 2 * levels and power[0] != 2:
        yield Scheme(rows, rows, levels, lambda: double_scheme(levels))
    larger = prime_power(rows)
    if power and larger and larger[0] == power[0] and rows <= LARGEST_FIELD:
        yield Scheme(rows, rows, levels, lambda: field_scheme(rows, levels))


def _splits(number: int, first: int, second: int) -> Iterator[tuple[int, int]]:
    """Yield the ways to write the number as a multiple of `first` times a multiple of `second`."""
    if number % (first * second) == 0:
        rest = number // (first * second)
        for part in divisors(rest):
            yield first * part, second * (rest // part)


def _kronecker(rows: int, levels: int) -> Iterator[Scheme]:
    for one, other in _splits(rows, levels, levels):
        if one <= other:
            a, b = best_scheme(one, levels), best_scheme(other, levels)
            build = _combined(lambda x, y: kronecker_scheme(x, y, levels), a, b)
            yield Scheme(rows, a.columns * b.columns, levels, build)


def _product(rows: int, levels: int) -> Iterator[Scheme]:
    smallest = prime_factors(levels)[0]
    first = smallest ** prime_factors(levels).count(smallest)
    second = levels // first
    if second == 1:
        return
    for one, other in _splits(rows, first, second):
        a, b = best_scheme(one, first), best_scheme(other, second)
        build = _combined(lambda x, y: product_scheme(x, y, second), a, b)
        yield Scheme(rows, min(a.columns, b.columns), levels, build)


def _quotient(rows: int, levels: int) -> Iterator[Scheme]:
    """Yield a stored scheme on a larger group without its leading digit (of the smallest prime): a homomorphism."""
    smallest = prime_factors(levels)[0]
    stored = stored_matrices.stored_scheme(rows, levels * smallest)
    if stored is not None:
        yield Scheme(rows, stored.shape[1], levels, lambda: stored % levels)


def _stacked(rows: int, levels: int) -> Iterator[Scheme]:
    """Yield two schemes, one above the other; the even split comes first to keep the recursion shallow."""
    if rows > MAX_STACKED * levels:
        return
    for one in range(rows // levels // 2 * levels, 0, -levels):
        a, b = best_scheme(one, levels), best_scheme(rows - one, levels)
        yield Scheme(rows, min(a.columns, b.columns), levels, _combined(stacked_scheme, a, b))


def _combined(combine: Callable[[IntArray, IntArray], IntArray], a: Scheme, b: Scheme) -> Callable[[], IntArray]:
    return lambda: combine(a.build(), b.build())
