import json
import os
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramcast.dataset_builder.store.splits import Split, make_folds, make_split
from vramcast.errors import UserError

GROUPS = [f"group{i}" for i in range(100)]
USUAL = {"train": 0.8, "validation": 0.1, "test": 0.1}

group_sets = st.sets(st.text(min_size=1), min_size=5, max_size=60)
seeds = st.integers()


@st.composite
def fractions(draw):
    """Draw two to five parts, with fractions such as 1/7 that no float represents."""
    weights = draw(st.lists(st.integers(1, 20), min_size=2, max_size=5))
    return {f"part{i}": weight / sum(weights) for i, weight in enumerate(weights)}


def test_parts_have_the_exact_sizes():
    split = make_split(GROUPS, USUAL, seed=1)
    assert {name: len(groups) for name, groups in split.parts.items()} == {
        "train": 80,
        "validation": 10,
        "test": 10,
    }


@given(group_sets, fractions(), seeds)
def test_every_group_is_in_one_part(groups, parts, seed):
    split = make_split(groups, parts, seed)
    members = [group for part in split.parts.values() for group in part]
    assert sorted(members) == sorted(groups)
    assert list(split.parts) == list(parts)
    assert all(split.parts.values())
    assert all(group in split.parts[split.part_of(group)] for group in groups)


@given(group_sets, fractions(), seeds, st.randoms(use_true_random=False))
def test_neither_order_nor_repetition_matters(groups, parts, seed, source):
    rows = sorted(groups) * 2
    source.shuffle(rows)
    assert make_split(rows, parts, seed) == make_split(groups, parts, seed)


@given(st.integers(5, 300), fractions(), seeds)
def test_no_part_is_off_by_more_than_one(count, parts, seed):
    split = make_split(map(str, range(count)), parts, seed)
    if min(parts.values()) * count >= 1:  # else the least of one group has to come from another part
        for name, members in split.parts.items():
            assert abs(len(members) - Fraction(parts[name]) * count) <= 1 + 1e-9


def test_seeds_differ():
    assert make_split(GROUPS, USUAL, 1) != make_split(GROUPS, USUAL, 2)


def test_a_split_never_changes():
    """Published results depend on it."""
    split = make_split("abcdefghij", {"train": 0.5, "test": 0.5}, seed=0)
    assert "".join(split.parts["test"]) == "aicbe"


def test_small_sets_leave_no_part_empty():
    sizes = [len(part) for part in make_split("abc", USUAL, 1).parts.values()]
    assert sizes == [1, 1, 1]
    with pytest.raises(UserError, match=r"at least 3 groups .* found 2"):
        make_split("ab", USUAL, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"a": 0.5},
        {"a": 0.6, "b": 0.6},
        {"a": 1.5, "b": -0.5},
        {"a": 1.0, "b": 0.0},
        {"a": float("nan"), "b": 1.0},
        {"a": "0.5", "b": 0.5},
        {"a": True},
    ],
)
def test_bad_fractions_are_refused(bad):
    with pytest.raises(UserError, match="sum to 1"):
        make_split(GROUPS, bad, 1)


def test_thirds_are_thirds():
    for third in (1 / 3, 0.3333333):
        split = make_split(GROUPS[:99], {"a": third, "b": third, "c": third}, 1)
        assert [len(part) for part in split.parts.values()] == [33, 33, 33]


@given(st.integers(2, 9), seeds)
def test_folds_are_even(k, seed):
    split = make_folds(GROUPS, k, seed)
    sizes = [len(part) for part in split.parts.values()]
    assert list(split.parts) == [f"fold{i}" for i in range(k)]
    assert sum(sizes) == len(GROUPS)
    assert max(sizes) - min(sizes) <= 1


def test_one_fold_is_refused():
    with pytest.raises(UserError, match="two folds"):
        make_folds(GROUPS, 1, 0)
    with pytest.raises(UserError, match="at least 4 groups"):
        make_folds("abc", 4, 0)


def test_an_unknown_group_is_refused():
    with pytest.raises(UserError, match="'stranger': make the split again"):
        make_split(GROUPS, USUAL, 1).part_of("stranger")


def test_round_trip(tmp_path):
    split = make_split([*GROUPS, "naïve ☃", "\ud800"], USUAL, 7)
    split.save(tmp_path / "split.json")
    assert Split.load(tmp_path / "split.json") == split
    assert [item.name for item in tmp_path.iterdir()] == ["split.json"]


def test_a_failing_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "split.json"
    split = make_split(GROUPS, USUAL, 7)
    split.save(path)

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        make_split(GROUPS, USUAL, 8).save(path)
    assert Split.load(path) == split
    assert [item.name for item in tmp_path.iterdir()] == ["split.json"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"version": 2}, "version is 2"),
        ({"parts": {"a": ["x", "y"], "b": ["x"]}}, "'x' is in the part 'a' and in 'b'"),
        ({"parts": {"a": ["x", "x"], "b": ["y"]}}, "'x' is in the part 'a' and in 'a'"),
        ({"parts": {"a": ["x"], "b": [3]}}, "group 3 is not a string"),
        ({"parts": {"a": ["x"], "b": "yz"}}, "not lists"),
        ({"parts": {"a": ["x"]}}, "do not match its parts"),
        ({"fractions": {"a": "half", "b": 0.5}}, "do not match its parts"),
        ({"seed": None}, "lacks a seed"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, change, fault):
    good = {"version": 1, "seed": 1, "fractions": {"a": 0.5, "b": 0.5}, "parts": {"a": ["x"], "b": ["y"]}}
    path = tmp_path / "split.json"
    path.write_text(json.dumps(good))
    assert Split.load(path).part_of("y") == "b"
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(UserError, match=fault):
        Split.load(path)


@pytest.mark.parametrize(("text", "fault"), [("{", "no JSON"), ("[]", "version is None"), ("\xff", "no JSON")])
def test_a_file_without_a_split_is_refused(tmp_path, text, fault):
    path = tmp_path / "split.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=fault):
        Split.load(path)
    with pytest.raises(UserError, match="No such file"):
        Split.load(tmp_path / "absent.json")


def test_many_groups_are_split_evenly_across_kinds():
    """The order is that of a hash and does not depend on the names."""
    groups = [f"{kind}{i}" for kind in "ab" for i in range(500)]
    random.Random(0).shuffle(groups)
    test = make_split(groups, {"train": 0.5, "test": 0.5}, 3).parts["test"]
    assert 200 < sum(group.startswith("a") for group in test) < 300
