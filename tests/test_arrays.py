import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.arrays import (
    catalogue,
    constructions,
    dealing,
    differences,
    fields,
    geometry,
    hadamard,
    orthogonal_array,
    packing,
    seeds,
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


def recount(array, levels, size):
    """The definition itself: (exact, worst deviation, share of tuples that occur) over all choices of columns."""
    exact, worst, seen, total = True, 0.0, 0, 0
    for columns in combinations(range(len(levels)), size):
        counts = Counter(tuple(int(row[j]) for j in columns) for row in array)
        cells = list(product(*(range(levels[j]) for j in columns)))
        expected = len(array) / len(cells)
        exact = exact and all(counts[cell] * len(cells) == len(array) for cell in cells)
        worst = max([worst, *(abs(counts[cell] - expected) / expected for cell in cells)])
        seen += sum(counts[cell] > 0 for cell in cells)
        total += len(cells)
    return exact, worst, seen / total


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
def test_groups_of_composite_order(order):
    add, sub = fields.addition(order), fields.subtraction(order)
    x, y, z = fields.words(order, 3)[::7].T
    assert np.array_equal(add[add[x, y], z], add[x, add[y, z]])
    assert np.array_equal(sub[add[x, y], y], x)


def test_sympy_is_left_alone_where_it_is_not_needed():
    code = "import sys; from dataset_builder.arrays import orthogonal_array; orthogonal_array([5] * 6 + [2])"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'sympy' not in sys.modules"], check=True)


def test_a_field_needs_a_prime_power():
    with pytest.raises(ValueError, match="prime power"):
        fields.multiplication(12)


# --- symmetric arrays


@pytest.mark.parametrize(
    ("s", "k"),
    [(s, k) for s in PRIME_POWERS for k in range(2, 9) if s**k < 2000 and (s**k - 1) // (s - 1) < 400],
)
def test_rao_hamming(s, k):
    array = constructions.rao_hamming(s, k)
    assert array.shape == (s**k, (s**k - 1) // (s - 1))
    assert_exact(array, [s] * array.shape[1])


@pytest.mark.parametrize(("s", "t"), [(s, t) for s in PRIME_POWERS for t in (2, 3) if s**t < 2000])
def test_bush(s, t):
    array = constructions.bush(s, t)
    assert array.shape == (s**t, s + 2 if t == 3 and s % 2 == 0 else s + 1)
    assert_exact(array, [s] * array.shape[1], t)


def test_bush_of_strength_four():
    assert_exact(constructions.bush(3, 4), [3] * 4, 4)
    with pytest.raises(ValueError, match="more levels or less strength"):
        constructions.bush(2, 4)


@pytest.mark.parametrize(
    ("s", "k"), [(s, k) for s in (3, 5, 7, 9, 11, 13, 25, 27) for k in (2, 3, 4, 5) if 2 * s**k < 2000]
)
def test_addelman_kempthorne(s, k):
    array = constructions.addelman_kempthorne(s, k)
    assert array.shape == (2 * s**k, 2 * (s**k - 1) // (s - 1) - 1)
    assert_exact(array, [s] * array.shape[1])


def test_addelman_kempthorne_is_for_odd_levels():
    with pytest.raises(ValueError, match="odd"):
        constructions.addelman_kempthorne(4, 2)


@pytest.mark.parametrize("order", range(4, 101, 4))
def test_hadamard_matrices_and_their_arrays(order):
    if hadamard.hadamard_source(order) is None:
        pytest.skip(f"no construction for order {order}")
    matrix = hadamard.hadamard(order)
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))
    array = constructions.hadamard_array(order)
    assert array.shape == (order, order - 1)
    assert_exact(array, [2] * (order - 1))
    if order <= 48:
        assert_exact(constructions.fold_over(array), [2] * order, 3)


def test_hadamard_orders_that_cannot_be_built():
    assert [n for n in range(4, 201, 4) if not hadamard.hadamard_source(n)] == [116, 156, 172, 188]
    assert hadamard.hadamard_source(6) is None
    with pytest.raises(ValueError, match="order 116"):
        hadamard.hadamard(116)


@pytest.mark.parametrize(
    ("s", "k"),
    [(s, k) for s in PRIME_POWERS for k in range(3, 7) if s**k < 1400],
)
def test_caps_give_strength_three(s, k):
    array = constructions.cap_array(s, k)
    assert array.shape == (s**k, geometry.cap_size(s, k))
    assert_exact(array, [s] * array.shape[1], 3)


def test_sizes_of_caps():
    assert [geometry.cap_size(2, k) for k in (3, 4, 5, 8)] == [4, 8, 16, 128]
    assert [geometry.cap_size(s, 4) for s in (3, 4, 5, 7)] == [10, 17, 26, 50]
    assert geometry.cap_size(3, 5) == 20


def test_products_of_arrays():
    two, three = constructions.rao_hamming(2, 3), constructions.rao_hamming(3, 2)
    assert_exact(constructions.kronecker_product(two, three, 3), [6] * 4)
    assert_exact(constructions.direct_product(two, three), [2] * 7 + [3] * 4)
    two, three = constructions.bush(2, 3), constructions.bush(3, 3)
    assert_exact(constructions.kronecker_product(two, three, 3), [6] * 4, 3)
    assert_exact(constructions.direct_product(two, three), [2] * 4 + [3] * 4, 3)
    assert_exact(constructions.full_factorial([2, 3, 4]), [2, 3, 4], 3)


# --- difference schemes and the mixed arrays they give


@pytest.mark.parametrize(("rows", "levels", "columns"), [(12, 3, 12), (12, 4, 12), (12, 12, 6)])
def test_stored_schemes_are_difference_schemes(rows, levels, columns):
    scheme = seeds.stored_scheme(rows, levels)
    assert scheme.shape == (rows, columns)
    sub = fields.subtraction(levels)
    for i, j in combinations(range(columns), 2):
        assert set(Counter(sub[scheme[:, i], scheme[:, j]].tolist()).values()) == {rows // levels}
    assert differences.is_difference_scheme(scheme, levels)
    broken = scheme.copy()
    broken[3, 1] = (broken[3, 1] + 1) % levels
    assert not differences.is_difference_scheme(broken, levels)


@pytest.mark.parametrize("levels", [3, 5, 7, 9, 11, 13, 25, 27])
def test_double_schemes(levels):
    scheme = differences.double_scheme(levels)
    assert scheme.shape == (2 * levels, 2 * levels)
    assert differences.is_difference_scheme(scheme, levels)


@pytest.mark.parametrize("levels", range(2, 21))
def test_best_schemes(levels):
    for rows in range(levels, 41, levels):
        scheme = differences.best_scheme(rows, levels)
        matrix = scheme.build()
        assert matrix.shape == (rows, scheme.columns)
        assert differences.is_difference_scheme(matrix, levels), str(scheme)
    assert differences.best_scheme(levels + 1, levels).columns == 1


@pytest.mark.parametrize(
    ("build", "notation"),
    [
        (constructions.taguchi_18, "L18(2^1 3^7)"),
        (constructions.taguchi_18_with_six, "L18(3^6 6^1)"),
        (constructions.taguchi_36, "L36(2^11 3^12)"),
        (constructions.taguchi_50, "L50(2^1 5^11)"),
        (constructions.taguchi_54, "L54(2^1 3^25)"),
        (lambda: seeds.block_array(12), "L12(2^4 3^1)"),
        (lambda: seeds.block_array(20), "L20(2^8 5^1)"),
        (lambda: seeds.block_array(28), "L28(2^12 7^1)"),
    ],
)
def test_named_mixed_arrays(build, notation):
    array = build()
    assert catalogue.notation(len(array), levels_of(array)) == notation
    assert_exact(array, levels_of(array))


@pytest.mark.parametrize(
    ("tail", "notation"),
    [
        ("L12(2^11)", "L36(2^11 3^12)"),
        ("L12(2^4 3^1)", "L36(2^4 3^13)"),
        ("L12(2^2 6^1)", "L36(2^2 3^12 6^1)"),
        ("L12(3^1 4^1)", "L36(3^13 4^1)"),
        ("L12(12^1)", "L36(3^12 12^1)"),
    ],
)
def test_variants_of_36_runs(tail, notation):
    inner = constructions.twelve_run_tails()[tail]
    assert catalogue.notation(12, levels_of(inner)) == tail
    assert_exact(inner, levels_of(inner))
    array = constructions.taguchi_36(inner)
    assert catalogue.notation(36, levels_of(array)) == notation
    assert_exact(array, levels_of(array))


def test_hadamard_with_a_column_of_four_levels():
    array = constructions.hadamard_with_four(12, constructions.hadamard_array(12), 3)
    assert catalogue.notation(24, levels_of(array)) == "L24(2^20 4^1)"
    assert_exact(array, levels_of(array))


# --- replacement


def test_expansive_replacement():
    array = constructions.rao_hamming(4, 2)
    for _ in range(4):
        array = constructions.expanded(array, 0, constructions.rao_hamming(2, 2))
        array = np.roll(array, -3, axis=1)
    assert catalogue.notation(16, levels_of(array)) == "L16(2^12 4^1)"
    assert_exact(array, levels_of(array))


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
def test_contractive_replacement(prime, length, dimensions, strength):
    subspaces = geometry.greedy_subspaces(prime, length, dimensions, strength)
    assert [len(basis) for basis in subspaces] == dimensions
    array = geometry.subspace_array(prime, length, subspaces)
    assert_exact(array, [prime**m for m in dimensions], strength)


def test_greed_says_when_it_fails():
    assert geometry.greedy_subspaces(2, 3, [2, 2], 2) is None


def test_multiples_of_subfields():
    for classes in range(4):
        subspaces = geometry.subfield_subspaces(2, classes)
        assert Counter(len(basis) for basis in subspaces) == Counter({3: 3 * classes, 2: 7 * (3 - classes)})
        assert_exact(geometry.subspace_array(2, 6, subspaces), [2 ** len(basis) for basis in subspaces])


# --- everything in the catalogue


@pytest.mark.parametrize("runs", [*range(4, 101), 108, 125, 128, 144])
def test_all_hosts_of_strength_two(runs):
    for host in catalogue.hosts(runs):
        array = host.build(range(len(host.levels)))
        assert array.shape == (runs, len(host.levels))
        assert_exact(array, host.levels)
        some = [len(host.levels) - 1, 0]
        assert np.array_equal(host.build(some), array[:, some]), host.name


@pytest.mark.parametrize(
    "asked", [[2] * 12, [3, 2, 2, 2, 2], [6] * 4, [6, 6, 3, 2], [4, 4, 3, 3, 2], [5, 4, 3, 2], [9, 3, 3, 3]]
)
def test_all_hosts_of_strength_three(asked):
    hosts = [host for host in strength_three.hosts(asked) if host.runs <= 600]
    assert hosts
    for host in hosts:
        columns = range(min(len(host.levels), 14))
        assert_exact(host.build(columns), host.levels[: len(columns)], 3)


@pytest.mark.parametrize("runs", [4, 6, 8, 12, 16, 24, 27, 36, 64])
def test_what_replaces_a_column_at_strength_three(runs):
    for host in strength_three.inner_hosts(runs):
        assert host.runs == runs
        assert_exact(host.build(range(len(host.levels))), host.levels, 3)


# --- verify


@st.composite
def tables(draw):
    levels = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    runs = draw(st.integers(1, 16))
    rows = [[draw(st.integers(0, level - 1)) for level in levels] for _ in range(runs)]
    return np.array(rows), levels


@settings(max_examples=150, deadline=None)
@given(tables(), st.integers(1, 3))
def test_verify_agrees_with_the_definition(table, strength):
    array, levels = table
    balance = verify(array, levels, strength)
    asked = min(strength, len(levels))
    found = [recount(array, levels, size) for size in range(1, asked + 1)]
    assert balance.exact == all(exact for exact, _, _ in found)
    assert balance.strength_reached == next((i for i, (exact, _, _) in enumerate(found) if not exact), asked)
    for size, (exact, worst, covered) in zip(balance.sizes, found, strict=True):
        assert (size.exact, size.coverage) == (exact, covered)
        assert size.worst_deviation == pytest.approx(worst)
    assert balance.worst_deviation == pytest.approx(found[-1][1])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_changed_cell_is_noticed(data):
    array, strength = data.draw(
        st.sampled_from([(constructions.taguchi_18(), 2), (constructions.bush(3, 3), 3), (constructions.bush(4, 2), 2)])
    )
    levels = levels_of(array)
    row, column = data.draw(st.integers(0, len(array) - 1)), data.draw(st.integers(0, len(levels) - 1))
    broken = array.copy()
    broken[row, column] = (broken[row, column] + data.draw(st.integers(1, levels[column] - 1))) % levels[column]
    balance = verify(broken, levels, strength)
    assert not balance.exact
    assert balance.strength_reached == 0
    assert column in balance.sizes[1].worst_columns


def test_verify_tells_the_strength_reached():
    balance = verify(constructions.rao_hamming(2, 2), [2] * 3, 3)
    assert (balance.exact, balance.strength, balance.strength_reached) == (False, 3, 2)
    assert (balance.worst_deviation, balance.worst_columns, balance.coverage) == (1.0, (0, 1, 2), 0.5)
    assert balance.proportional
    assert "strength 2 of 3" in str(balance)
    assert "\n" not in str(balance)


def test_verify_names_the_worst_columns_and_sees_dependence():
    array = constructions.full_factorial([2, 2, 2])
    array[:, 2] = array[:, 0]
    balance = verify(array, [2, 2, 2])
    assert (balance.worst_columns, balance.worst_deviation, balance.proportional) == ((0, 2), 1.0, False)
    collapsed = constructions.full_factorial([4, 4]) % 3
    assert verify(collapsed, [3, 3]).proportional
    assert not verify(array, [2, 2, 2], 1).proportional
    assert verify(array, [2, 2, 2], 1).exact


def test_verify_in_chunks(monkeypatch):
    array, levels = constructions.taguchi_36(), [3] * 12 + [2] * 11
    array[0, 0] = (array[0, 0] + 1) % 3
    before = verify(array, levels)
    monkeypatch.setattr(sys.modules[verify.__module__], "_CELLS_AT_ONCE", 100)
    assert verify(array, levels) == before


@pytest.mark.parametrize(
    ("array", "levels", "strength", "message"),
    [
        ([[0, 1]], [2, 2], 0, "strength"),
        ([0, 1], [2, 2], 2, "matrix"),
        ([[0.5, 1]], [2, 2], 2, "matrix"),
        ([[0, 1]], [2], 2, "columns"),
        ([[0, 2]], [2, 2], 2, "outside"),
        ([[0, -1]], [2, 2], 2, "outside"),
    ],
)
def test_verify_refuses_nonsense(array, levels, strength, message):
    with pytest.raises(ValueError, match=message):
        verify(array, levels, strength)


# --- the choice


@pytest.mark.parametrize(
    ("levels", "strength", "notation"),
    [
        ([2] * 3, 2, "L4(2^3)"),
        ([2] * 7, 2, "L8(2^7)"),
        ([4] + [2] * 4, 2, "L8(2^4 4^1)"),
        ([3] * 4, 2, "L9(3^4)"),
        ([2] * 11, 2, "L12(2^11)"),
        ([3, 4], 2, "L12(3^1 4^1)"),
        ([6, 2, 2], 2, "L12(2^2 6^1)"),
        ([4] * 5, 2, "L16(4^5)"),
        ([4] + [2] * 12, 2, "L16(2^12 4^1)"),
        ([8] + [2] * 8, 2, "L16(2^8 8^1)"),
        ([2] + [3] * 7, 2, "L18(2^1 3^7)"),
        ([6] + [3] * 6, 2, "L18(3^6 6^1)"),
        ([10, 2, 2], 2, "L20(2^2 10^1)"),
        ([4] + [2] * 20, 2, "L24(2^20 4^1)"),
        ([3, 4] + [2] * 13, 2, "L24(2^13 3^1 4^1)"),
        ([5] * 6, 2, "L25(5^6)"),
        ([3] * 13, 2, "L27(3^13)"),
        ([9] + [3] * 9, 2, "L27(3^9 9^1)"),
        ([8] + [4] * 8, 2, "L32(4^8 8^1)"),
        ([2] * 11 + [3] * 12, 2, "L36(2^11 3^12)"),
        ([3] * 13 + [4], 2, "L36(3^13 4^1)"),
        ([6] * 3, 2, "L36(6^3)"),
        ([4] * 13 + [3], 2, "L48(3^1 4^13)"),
        ([7] * 8, 2, "L49(7^8)"),
        ([2] + [5] * 11, 2, "L50(2^1 5^11)"),
        ([2] + [3] * 25, 2, "L54(2^1 3^25)"),
        ([8] * 9, 2, "L64(8^9)"),
        ([8] * 3 + [4] * 14, 2, "L64(4^14 8^3)"),
        ([9] * 10, 2, "L81(9^10)"),
        ([12] * 7, 2, "L144(12^7)"),
        ([2] * 4, 3, "L8(2^4)"),
        ([2] * 8, 3, "L16(2^8)"),
        ([2] * 12, 3, "L24(2^12)"),
        ([3] + [2] * 4, 3, "L24(2^4 3^1)"),
        ([3] * 4, 3, "L27(3^4)"),
        ([4] + [2] * 7, 3, "L32(2^7 4^1)"),
        ([4] * 6, 3, "L64(4^6)"),
        ([3] * 10, 3, "L81(3^10)"),
        ([6] * 4, 3, "L216(6^4)"),
        ([3, 2], 3, "L6(2^1 3^1)"),
        ([5, 4, 3, 2], 3, "L120(2^1 3^1 4^1 5^1)"),
        ([7], 2, "L7(7^1)"),
        ([2, 4, 4], 1, "L4(2^1 4^2)"),
    ],
)
def test_known_smallest_arrays_are_found_and_exact(levels, strength, notation):
    array = orthogonal_array(levels, strength)
    assert array.notation == notation
    assert array.levels == tuple(levels)
    assert array.balance.exact, str(array.balance)
    assert array.strength == min(strength, len(levels))
    assert "dropped" not in array.construction
    assert "->" not in array.construction


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_any_levels_can_be_had(levels, strength):
    array = orthogonal_array(levels, strength)
    assert array.runs.shape[1] == len(levels) == len(array.levels)
    assert len(array.runs) <= prod(levels)
    for column, level in zip(array.runs.T, levels, strict=True):
        assert set(column.tolist()) == set(range(level))
    size = min(strength, len(levels))
    exact, worst, covered = recount(array.runs, levels, size)
    assert (array.balance.exact, array.balance.coverage) == (exact, covered)
    assert array.balance.worst_deviation == pytest.approx(worst)
    assert covered == 1
    assert exact or "->" in array.construction or strength == 1
    assert array.notation.startswith(f"L{len(array.runs)}(")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=8, max_size=25))
def test_many_factors(levels):
    array = orthogonal_array(levels)
    assert array.runs.shape == (array.balance.runs, len(levels))
    assert array.balance == verify(array.runs, levels)
    assert array.balance.coverage == 1
    assert array.balance.sizes[0].worst_deviation < 0.5


def test_same_input_same_array():
    levels = [3, 5, 2, 7, 4, 4, 6]
    first = orthogonal_array(levels)
    for cached in (differences.best_scheme, catalogue.inner_hosts, hadamard.hadamard):
        cached.cache_clear()
    second = orthogonal_array(levels)
    assert np.array_equal(first.runs, second.runs)
    assert first.construction == second.construction


@pytest.mark.parametrize(
    ("levels", "strength", "construction"),
    [
        ([4, 4, 3, 3], 2, "Rao-Hamming OA(16, 5, 4, 2), 1 column dropped, 4->3 levels in 2 columns"),
        ([2] * 10, 2, "Hadamard OA(12, 11, 2, 2) (Paley I), 1 column dropped"),
        ([6] * 8, 2, "Rao-Hamming OA(49, 8, 7, 2), 7->6 levels in 8 columns"),
        ([1, 2, 3, 1], 2, "full factorial 3 x 2, 2 constant columns added"),
        ([1, 1], 2, "one run of constant columns"),
        ([3] * 9, 3, "cap OA(81, 10, 3, 3), 1 column dropped"),
    ],
)
def test_the_construction_says_what_was_done(levels, strength, construction):
    assert orthogonal_array(levels, strength).construction == construction


def test_a_replaced_column_is_told():
    array = orthogonal_array([12] * 5 + [4, 4, 3, 3])
    assert array.balance.exact
    assert array.notation == "L144(3^2 4^2 12^5)"
    assert array.construction == (
        "difference scheme D(12, 6, 12) over full factorial 3 x 4, 1 column of 12 levels replaced by 3^1 4^1"
    )


def test_fewest_runs_come_before_balance():
    array = orthogonal_array([3] * 4 + [2])
    assert array.notation == "L16(2^1 3^4)"
    assert not array.balance.exact
    assert array.balance.coverage == 1


def test_merging_to_a_divisor_keeps_the_balance():
    array = orthogonal_array([8, 8, 4, 2])
    assert array.balance.exact
    assert len(array.runs) == 64
    assert orthogonal_array([9, 9, 3, 3]).balance.exact


def test_columns_come_in_the_order_asked():
    array = orthogonal_array([2, 3, 3, 1, 3, 3, 3, 3, 3])
    assert [len(set(column)) for column in array.runs.T.tolist()] == [2, 3, 3, 1, 3, 3, 3, 3, 3]
    assert array.balance.exact


def test_max_runs():
    assert len(orthogonal_array([2] * 11, max_runs=12).runs) == 12
    with pytest.raises(ValueError, match=r"at most 11 runs.*L12\(2\^11\).*raise max_runs to 12"):
        orthogonal_array([2] * 11, max_runs=11)
    with pytest.raises(ValueError, match="raise max_runs to 27000000"):  # refused before it is built
        orthogonal_array([300] * 3, strength=3, max_runs=1000)


@pytest.mark.parametrize(
    ("levels", "strength", "message"),
    [
        ([], 2, "one factor or more"),
        ([2, 0], 2, "1 level or more"),
        ([2, -3], 2, "1 level or more"),
        ([2, 2.5], 2, "whole numbers"),
        (None, 2, "whole numbers"),
        ([2, 2], 0, "strength of 1, 2 or 3"),
        ([2, 2], 4, "strength of 1, 2 or 3"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(levels, strength, message):
    with pytest.raises(ValueError, match=message) as caught:
        orthogonal_array(levels, strength)
    assert "\n" not in str(caught.value)


# --- bringing columns down to fewer levels


@pytest.mark.parametrize(
    ("s", "asked"), [(4, [3] * 4 + [2]), (7, [6] * 8), (8, [5, 5, 6, 6, 7, 7, 3]), (16, list(range(2, 17)))]
)
def test_dealing_beats_the_renaming_of_whole_levels(s, asked):
    host = constructions.rao_hamming(s, 2)[:, : len(asked)]
    dealt = verify(dealing.deal(host, [s] * len(asked), asked), asked)
    renamed = verify(host % np.array(asked), asked)
    assert dealt.worst_deviation < renamed.worst_deviation
    assert dealt.coverage == renamed.coverage == 1
    for column, level in zip(dealing.deal(host, [s] * len(asked), asked).T, asked, strict=True):
        assert max(Counter(column.tolist()).values()) <= -(-len(host) // level)


def test_large_arrays_are_renamed(monkeypatch):
    monkeypatch.setattr(dealing, "_MOST_STEPS", 10)
    host = constructions.rao_hamming(7, 2)
    assert np.array_equal(dealing.deal(host, [7] * 8, [6] * 8), host % 6)


def test_a_packing_prefers_exact_columns():
    host = next(h for h in catalogue.hosts(24) if sorted(h.levels)[-2:] == [3, 4] and len(h.levels) == 15)
    found = packing.pack(host, [4, 3, 2, 2], catalogue.inner_hosts)
    assert [place.levels for place in found.places] == [4, 3, 2, 2]
    assert found.loss == (0, 0)
    assert packing.pack(host, [5], catalogue.inner_hosts) is None
