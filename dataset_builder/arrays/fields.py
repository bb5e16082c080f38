"""Finite fields GF(p^k) and the abelian groups under them, as tables of small integers.

An element is an integer whose digits in base p are the coefficients of its polynomial; addition goes digit by digit.
Polynomial arithmetic comes from sympy, which torch depends on anyway; the library `galois` would pull in numba and
compile at first use. Importing sympy takes about a second, so it is imported only for fields of non-prime order.
"""

from functools import cache
from math import isqrt

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@cache
def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number with multiplicity, ascending."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return (*factors, number) if number > 1 else tuple(factors)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, ascending, including 1 and the number itself."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


def prime_power(number: int) -> tuple[int, int] | None:
    """Return (p, k) with p prime and p^k the number, or None."""
    factors = prime_factors(number)
    return (factors[0], len(factors)) if len(set(factors)) == 1 else None


def frozen(table: IntArray) -> IntArray:
    """Make the table read-only, because cached tables are shared."""
    table.setflags(write=False)
    return table


@cache
def addition(order: int) -> IntArray:
    """Return the addition table of the product of cyclic groups of prime order; for a prime power that of GF(order)."""
    table = np.zeros((1, 1), dtype=np.int64)
    for prime in prime_factors(order):
        digit = np.add.outer(np.arange(prime), np.arange(prime)) % prime
        size = len(table) * prime
        table = (table[:, None, :, None] * prime + digit[None, :, None, :]).reshape(size, size)
    return frozen(table)


@cache
def subtraction(order: int) -> IntArray:
    """Return the subtraction table of the same group as `addition`."""
    return frozen(np.argsort(addition(order), axis=0).astype(np.int64))


@cache
def multiplication(order: int) -> IntArray:
    """Return the multiplication table of GF(order)."""
    parts = prime_power(order)
    if parts is None:
        raise ValueError(f"expected a prime power as the order of a field, found {order}: choose 2, 3, 4, 5, 7...")
    if parts[1] == 1:
        return frozen(np.multiply.outer(np.arange(order), np.arange(order)) % order)
    powers = np.array(field_powers(*parts), dtype=np.int64)
    logs = np.zeros(order, dtype=np.int64)
    logs[powers] = np.arange(order - 1)
    table = powers[np.add.outer(logs, logs) % (order - 1)]
    table[0, :] = table[:, 0] = 0
    return frozen(table)


@cache
def field_powers(prime: int, degree: int) -> tuple[int, ...]:
    """Return the powers of x modulo the first monic polynomial of this degree for which x generates the field."""
    from sympy import ZZ  # noqa: PLC0415 - slow to import, see the docstring of the module
    from sympy.polys.galoistools import gf_irreducible_p, gf_mul, gf_rem  # noqa: PLC0415

    order = prime**degree
    for tail in range(1, order):
        modulus = [ZZ(1), *(ZZ(tail // prime**i % prime) for i in reversed(range(degree)))]
        if not gf_irreducible_p(modulus, prime, ZZ):
            continue
        element, powers = [ZZ(1)], [1]
        while True:
            element = gf_rem(gf_mul(element, [ZZ(1), ZZ(0)], prime, ZZ), modulus, prime, ZZ)
            if element == [1]:
                break
            powers.append(sum(int(c) * prime**i for i, c in enumerate(reversed(element))))
        if len(powers) == order - 1:
            return tuple(powers)
    raise AssertionError(f"no primitive polynomial of degree {degree} over GF({prime})")


@cache
def squares(order: int) -> frozenset[int]:
    """Return the non-zero squares of GF(order)."""
    return frozenset(int(x) for x in np.diag(multiplication(order))[1:])


def inverse(order: int, element: int) -> int:
    """Return the multiplicative inverse in GF(order)."""
    return int(np.flatnonzero(multiplication(order)[element] == 1)[0])


def words(order: int, length: int) -> IntArray:
    """Return all words of this length over 0..order-1, one per row, the last letter varying fastest."""
    return np.indices((order,) * length, dtype=np.int64).reshape(length, -1).T
