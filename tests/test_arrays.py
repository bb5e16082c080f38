"""The parts of orthogonal arrays: fields, Hadamard matrices, caps, difference schemes and hosts."""

import subprocess
import sys
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from vramcast.dataset_builder.arrays import (
    catalogue,
    constructions,
    differences,
    fields,
    geometry,
    hadamard,
    orthogonal_array,
    stored_matrices,
    strength_three,
    verify,
)

PRIME_POWERS = [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32, 37, 41, 43]


def levels_of(array):
    return [int(top) + 1 for top in array.max(axis=0)]


def assert_exact(array, levels, strength=2):
    balance = verify(array, levels, strength)
    assert balance.exact, str(balance)
    assert balance.strength_reached == min(strength, len(levels))


# --- fields and groups


@pytest.mark.parametrize("order", [2, 3, 4, 5, 7, 8, 9, 16, 25, 27, 32, 49])
def test_field_laws_hold(order):
    add, mul = fields.addition(order), fields.multiplication(order)
    x, y, z = (fields.words(order, 3)[:: max(1, order**3 // 20000)]).T
    assert np.array_equal(mul[x, add[y, z]], add[mul[x, y], mul[x, z]])
    assert np.array_equal(mul[mul[x, y], z], mul[x, mul[y, z]])
    assert np.array_equal(add[add[x, y], z], add[x, add[y, z]])
    assert np.array_equal(np.sort(mul[1:, 1:], axis=1), np.tile(np.arange(1, order), (order - 1, 1)))
    assert np.array_equal(mul, mul.T)
    assert np.array_equal(mul[1], np.arange(order))


@pytest.mark.parametrize("order", [243, 256, 343, 625, 1009, 1024])
def test_large_fields_have_inverses_and_distribute(order):
    add, mul = fields.addition(order), fields.multiplication(order)
    assert np.array_equal(np.sort(mul[1:], axis=1)[:, -1], np.full(order - 1, order - 1))
    x, y, z = np.random.default_rng(0).integers(0, order, (3, 1000))
    assert np.array_equal(mul[x, add[y, z]], add[mul[x, y], mul[x, z]])


@pytest.mark.parametrize("order", [6, 10, 12, 15, 36])
def test_addition_of_composite_order_is_a_group(order):
    add, sub = fields.addition(order), fields.subtraction(order)
    x, y, z = fields.words(order, 3)[::7].T
    assert np.array_equal(add[add[x, y], z], add[x, add[y, z]])
    assert np.array_equal(sub[add[x, y], y], x)


def test_sympy_is_imported_only_when_needed():
    code = "import sys; from vramcast.dataset_builder.arrays import orthogonal_array; orthogonal_array([5] * 6 + [2])"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'sympy' not in sys.modules"], check=True)


def test_a_field_needs_a_prime_power():
    with pytest.raises(ValueError, match="prime power"):
        fields.multiplication(12)


# --- symmetric arrays


def assert_smallest(levels, strength, runs):
    array = orthogonal_array(levels, strength)
    assert len(array.runs) == runs
    assert array.balance.exact, str(array.balance)
    assert_exact(array.runs, levels, strength)


@pytest.mark.parametrize(
    ("s", "k"),
    [(s, k) for s in PRIME_POWERS for k in range(2, 9) if s**k < 2000 and (s**k - 1) // (s - 1) < 400],
)
def test_every_prime_power_has_an_array_of_strength_two(s, k):
    """OA(s^k, (s^k-1)/(s-1), s, 2): the optimal parameters of Rao and Hamming."""
    assert_smallest([s] * ((s**k - 1) // (s - 1)), 2, s**k)


@pytest.mark.parametrize("s", [s for s in PRIME_POWERS if s**3 < 2000])
def test_every_prime_power_has_an_array_of_strength_three(s):
    """OA(s^3, s+1, s, 3), with one more column for even s: Bush's parameters."""
    assert_smallest([s] * (s + 2 if s % 2 == 0 else s + 1), 3, s**3)


@pytest.mark.parametrize(
    ("s", "k"), [(s, k) for s in (3, 5, 7, 9, 11, 13, 25, 27) for k in (2, 3, 4, 5) if 2 * s**k < 2000]
)
def test_arrays_with_twice_a_prime_power_of_runs(s, k):
    """OA(2 s^k, 2(s^k-1)/(s-1) - 1, s, 2) for odd s: Addelman and Kempthorne's parameters."""
    assert_smallest([s] * (2 * (s**k - 1) // (s - 1) - 1), 2, 2 * s**k)


@pytest.mark.parametrize("order", range(4, 101, 4))
def test_hadamard_matrices_and_their_arrays_are_orthogonal(order):
    if hadamard.hadamard_source(order) is None:
        pytest.skip(f"no construction for order {order}")
    matrix = hadamard.hadamard(order)
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))
    array = constructions.hadamard_array(order)
    assert array.shape == (order, order - 1)
    assert_exact(array, [2] * (order - 1))
    if order <= 48:
        assert_exact(constructions.fold_over(array), [2] * order, 3)


def test_an_unknown_hadamard_order_is_rejected():
    assert [n for n in range(4, 201, 4) if not hadamard.hadamard_source(n)] == [116, 156, 172, 188]
    assert hadamard.hadamard_source(6) is None
    with pytest.raises(ValueError, match="found 116"):
        hadamard.hadamard(116)


@pytest.mark.parametrize(
    ("s", "k"),
    [(s, k) for s in PRIME_POWERS for k in range(3, 7) if s**k < 1400],
)
def test_caps_give_strength_three(s, k):
    host = strength_three.cap_host(s, k)
    array = host.build(range(len(host.levels)))
    assert array.shape == (s**k, geometry.cap_size(s, k))
    assert_exact(array, [s] * array.shape[1], 3)


def test_caps_have_the_published_sizes():
    assert [geometry.cap_size(2, k) for k in (3, 4, 5, 8)] == [4, 8, 16, 128]
    assert [geometry.cap_size(s, 4) for s in (3, 4, 5, 7)] == [10, 17, 26, 50]
    assert geometry.cap_size(3, 5) == 20


@pytest.mark.parametrize(("paired", "levels"), [(0, [2] * 4 + [3] * 4), (4, [6] * 4)])
def test_products_of_arrays_are_exact(paired, levels):
    host = strength_three.product_host([strength_three.cap_host(2, 3), strength_three.cap_host(3, 3)], paired)
    assert host.levels == tuple(levels)
    assert_exact(host.build(range(len(levels))), levels, 3)


def test_a_full_factorial_has_any_strength():
    assert_exact(constructions.full_factorial([2, 3, 4]), [2, 3, 4], 3)


# --- difference schemes and their mixed arrays


def is_difference_scheme(matrix, levels):
    """Count the defining property."""
    rows, columns = matrix.shape
    table = fields.subtraction(levels)
    return all(
        set(Counter(table[matrix[:, i], matrix[:, j]].tolist()).values()) == {rows // levels}
        for i, j in combinations(range(columns), 2)
    )


@pytest.mark.parametrize(("rows", "levels", "columns"), [(12, 3, 12), (12, 4, 12), (12, 12, 6)])
def test_stored_schemes_are_difference_schemes(rows, levels, columns):
    scheme = stored_matrices.stored_scheme(rows, levels)
    assert scheme.shape == (rows, columns)
    assert is_difference_scheme(scheme, levels)
    broken = scheme.copy()
    broken[3, 1] = (broken[3, 1] + 1) % levels
    assert not is_difference_scheme(broken, levels)


@pytest.mark.parametrize("levels", [3, 5, 7, 9, 11, 13, 25, 27])
def test_double_schemes_are_difference_schemes(levels):
    scheme = differences.double_scheme(levels)
    assert scheme.shape == (2 * levels, 2 * levels)
    assert is_difference_scheme(scheme, levels)


@pytest.mark.parametrize("levels", range(2, 21))
def test_best_schemes_are_difference_schemes(levels):
    for rows in range(levels, 41, levels):
        scheme = differences.best_scheme(rows, levels)
        matrix = scheme.build()
        assert matrix.shape == (rows, scheme.columns)
        assert is_difference_scheme(matrix, levels), str(scheme)
    assert differences.best_scheme(levels + 1, levels).columns == 1


@pytest.mark.parametrize(("runs", "notation"), [(12, "L12(2^4 3^1)"), (20, "L20(2^8 5^1)"), (28, "L28(2^12 7^1)")])
def test_stored_mixed_arrays_are_exact(runs, notation):
    array = stored_matrices.block_array(runs)
    assert catalogue.notation(len(array), levels_of(array)) == notation
    assert_exact(array, levels_of(array))


def test_hadamard_with_a_column_of_four_levels_is_exact():
    array = constructions.hadamard_with_four(12, constructions.hadamard_array(12), 3)
    assert catalogue.notation(24, levels_of(array)) == "L24(2^20 4^1)"
    assert_exact(array, levels_of(array))


# --- replacement


@pytest.mark.parametrize(
    ("prime", "length", "dimensions", "strength"),
    [
        (2, 4, [2] + [1] * 12, 2),
        (2, 4, [3] + [1] * 8, 2),
        (2, 4, [2] * 5, 2),
        (2, 5, [3] + [2] * 4, 2),
        (2, 6, [3, 3] + [2] * 10, 2),
        (3, 3, [2] + [1] * 9, 2),
        (3, 4, [2] * 10, 2),
        (5, 3, [2] + [1] * 25, 2),
        (2, 5, [2] + [1] * 7, 3),
        (2, 6, [2] * 6, 3),
        (2, 6, [1] * 32, 3),
        (2, 8, [3] + [2] * 4 + [1] * 8, 3),
        (3, 4, [1] * 8, 3),
    ],
)
def test_contractive_replacement_is_exact(prime, length, dimensions, strength):
    subspaces = geometry.greedy_subspaces(prime, length, dimensions, strength)
    assert [len(basis) for basis in subspaces] == dimensions
    array = geometry.subspace_array(prime, length, subspaces)
    assert_exact(array, [prime**m for m in dimensions], strength)


def test_a_failed_greedy_search_returns_none():
    assert geometry.greedy_subspaces(2, 3, [2, 2], 2) is None


def test_multiples_of_subfields_partition_the_field():
    for classes in range(4):
        subspaces = geometry.subfield_subspaces(2, classes)
        assert Counter(len(basis) for basis in subspaces) == Counter({3: 3 * classes, 2: 7 * (3 - classes)})
        assert_exact(geometry.subspace_array(2, 6, subspaces), [2 ** len(basis) for basis in subspaces])


# --- everything in the catalogue


@pytest.mark.parametrize("runs", [*range(4, 101), 108, 125, 128, 144])
def test_all_hosts_of_strength_two_are_exact(runs):
    for host in catalogue.hosts(runs):
        array = host.build(range(len(host.levels)))
        assert array.shape == (runs, len(host.levels))
        assert_exact(array, host.levels)
        some = [len(host.levels) - 1, 0]
        assert np.array_equal(host.build(some), array[:, some]), host.name


@pytest.mark.parametrize(
    "levels", [[2] * 12, [3, 2, 2, 2, 2], [6] * 4, [6, 6, 3, 2], [4, 4, 3, 3, 2], [5, 4, 3, 2], [9, 3, 3, 3]]
)
def test_all_hosts_of_strength_three_are_exact(levels):
    hosts = [host for host in strength_three.hosts(levels) if host.runs <= 600]
    assert hosts
    for host in hosts:
        columns = range(min(len(host.levels), 14))
        assert_exact(host.build(columns), host.levels[: len(columns)], 3)


@pytest.mark.parametrize("runs", [4, 6, 8, 12, 16, 24, 27, 36, 64])
def test_arrays_that_replace_a_column_have_strength_three(runs):
    for host in strength_three.inner_hosts(runs):
        assert host.runs == runs
        assert_exact(host.build(range(len(host.levels))), host.levels, 3)
