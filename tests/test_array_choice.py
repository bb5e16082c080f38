"""Arrays are verified by counting, and the smallest array is chosen for any levels."""

import sys
from collections import Counter
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramcast.dataset_builder.arrays import (
    catalogue,
    constructions,
    differences,
    hadamard,
    level_merging,
    orthogonal_array,
    packing,
    verify,
)


def recount(array, levels, size):
    """Return (exact, worst deviation, share of tuples that occur) over all choices of columns, by definition."""
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
    highest = min(strength, len(levels))
    expected = [recount(array, levels, size) for size in range(1, highest + 1)]
    assert balance.exact == all(exact for exact, _, _ in expected)
    assert balance.strength_reached == next((i for i, (exact, _, _) in enumerate(expected) if not exact), highest)
    for size, (exact, worst, covered) in zip(balance.sizes, expected, strict=True):
        assert (size.exact, size.coverage) == (exact, covered)
        assert size.worst_deviation == pytest.approx(worst)
    assert balance.worst_deviation == pytest.approx(expected[-1][1])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_verify_detects_one_changed_cell(data):
    levels, strength = data.draw(st.sampled_from([([2] + [3] * 7, 2), ([3] * 4, 3), ([4] * 5, 2)]))
    array = orthogonal_array(levels, strength).runs
    row, column = data.draw(st.integers(0, len(array) - 1)), data.draw(st.integers(0, len(levels) - 1))
    broken = array.copy()
    broken[row, column] = (broken[row, column] + data.draw(st.integers(1, levels[column] - 1))) % levels[column]
    balance = verify(broken, levels, strength)
    assert not balance.exact
    assert balance.strength_reached == 0
    assert column in balance.sizes[1].worst_columns


def test_verify_reports_the_strength_reached():
    balance = verify(orthogonal_array([2] * 3).runs, [2] * 3, 3)
    assert (balance.exact, balance.strength, balance.strength_reached) == (False, 3, 2)
    assert (balance.worst_deviation, balance.worst_columns, balance.coverage) == (1.0, (0, 1, 2), 0.5)
    assert balance.proportional
    assert "exact up to strength 2" in str(balance)
    assert "\n" not in str(balance)


def test_verify_reports_the_worst_columns_and_dependence():
    array = constructions.full_factorial([2, 2, 2])
    array[:, 2] = array[:, 0]
    balance = verify(array, [2, 2, 2])
    assert (balance.worst_columns, balance.worst_deviation, balance.proportional) == ((0, 2), 1.0, False)
    collapsed = constructions.full_factorial([4, 4]) % 3
    assert verify(collapsed, [3, 3]).proportional
    assert not verify(array, [2, 2, 2], 1).proportional
    assert verify(array, [2, 2, 2], 1).exact


def test_verify_gives_the_same_result_in_chunks(monkeypatch):
    levels = [3] * 12 + [2] * 11
    array = orthogonal_array(levels).runs
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
def test_verify_rejects_invalid_input(array, levels, strength, message):
    with pytest.raises(ValueError, match=message):
        verify(array, levels, strength)


# --- choosing an array


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
        ([2] * 4 + [3] * 13, 2, "L36(2^4 3^13)"),
        ([2] * 2 + [3] * 12 + [6], 2, "L36(2^2 3^12 6^1)"),
        ([3] * 12 + [12], 2, "L36(3^12 12^1)"),
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
def test_there_is_an_array_for_any_levels(levels, strength):
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
def test_arrays_of_many_factors_cover_all_pairs(levels):
    array = orthogonal_array(levels)
    assert array.runs.shape == (array.balance.runs, len(levels))
    assert array.balance == verify(array.runs, levels)
    assert array.balance.coverage == 1
    assert array.balance.sizes[0].worst_deviation < 0.5


def test_the_same_levels_give_the_same_array():
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
def test_the_construction_describes_how_the_array_was_built(levels, strength, construction):
    assert orthogonal_array(levels, strength).construction == construction


def test_the_construction_names_replaced_columns():
    array = orthogonal_array([12] * 5 + [4, 4, 3, 3])
    assert array.balance.exact
    assert array.notation == "L144(3^2 4^2 12^5)"
    assert array.construction == (
        "difference scheme D(12, 6, 12) over full factorial 3 x 4, 1 column of 12 levels replaced by 3^1 4^1"
    )


def test_fewer_runs_are_preferred_to_better_balance():
    array = orthogonal_array([3] * 4 + [2])
    assert array.notation == "L16(2^1 3^4)"
    assert not array.balance.exact
    assert array.balance.coverage == 1


def test_merging_to_a_divisor_keeps_the_balance():
    array = orthogonal_array([8, 8, 4, 2])
    assert array.balance.exact
    assert len(array.runs) == 64
    assert orthogonal_array([9, 9, 3, 3]).balance.exact


def test_columns_keep_the_requested_order():
    array = orthogonal_array([2, 3, 3, 1, 3, 3, 3, 3, 3])
    assert [len(set(column)) for column in array.runs.T.tolist()] == [2, 3, 3, 1, 3, 3, 3, 3, 3]
    assert array.balance.exact


def test_an_array_of_more_than_max_runs_is_rejected():
    assert len(orthogonal_array([2] * 11, max_runs=12).runs) == 12
    with pytest.raises(ValueError, match=r"at most 11 runs.*L12\(2\^11\).*raise max_runs to 12"):
        orthogonal_array([2] * 11, max_runs=11)
    with pytest.raises(ValueError, match="raise max_runs to 27000000"):  # rejected before it is built
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
def test_invalid_levels_raise_one_sentence(levels, strength, message):
    with pytest.raises(ValueError, match=message) as caught:
        orthogonal_array(levels, strength)
    assert "\n" not in str(caught.value)


# --- reducing columns to fewer levels


@pytest.mark.parametrize(
    ("s", "levels"), [(4, [3] * 4 + [2]), (7, [6] * 8), (8, [5, 5, 6, 6, 7, 7, 3]), (16, list(range(2, 17)))]
)
def test_merging_run_by_run_is_more_balanced_than_renaming_levels(s, levels):
    host = orthogonal_array([s] * (s + 1)).runs[:, : len(levels)]
    merged = verify(level_merging.merge_levels(host, [s] * len(levels), levels), levels)
    renamed = verify(host % np.array(levels), levels)
    assert merged.worst_deviation < renamed.worst_deviation
    assert merged.coverage == renamed.coverage == 1
    for column, level in zip(level_merging.merge_levels(host, [s] * len(levels), levels).T, levels, strict=True):
        assert max(Counter(column.tolist()).values()) <= -(-len(host) // level)


def test_levels_of_large_arrays_are_renamed(monkeypatch):
    monkeypatch.setattr(level_merging, "_MAX_STEPS", 10)
    host = orthogonal_array([7] * 8).runs
    assert np.array_equal(level_merging.merge_levels(host, [7] * 8, [6] * 8), host % 6)


def test_a_packing_prefers_exact_columns():
    host = next(h for h in catalogue.hosts(24) if sorted(h.levels)[-2:] == [3, 4] and len(h.levels) == 15)
    result = packing.pack(host, [4, 3, 2, 2], catalogue.inner_hosts)
    assert [place.levels for place in result.places] == [4, 3, 2, 2]
    assert result.loss == (0, 0)
    assert packing.pack(host, [5], catalogue.inner_hosts) is None
