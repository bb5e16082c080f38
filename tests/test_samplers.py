"""Samplers: the contract of all, and the properties of each."""

from collections import Counter
from itertools import combinations, islice

import pytest

from vramcast.dataset_builder.samplers import SAMPLERS, make_sampler
from vramcast.dataset_builder.samplers.coverage import coverage, coverage_report
from vramcast.dataset_builder.space import parse_space
from vramcast.errors import UserError

FACTORS = {
    "arch": {"choice": ["pyramid", "uniform", "bottleneck", "gradual"]},
    "width": {"int": [8, 72], "levels": 4},
    "depth": {"int": [1, 9], "levels": 4},
    "batch": {"int": [2, 130], "log": True, "levels": 4},
    "act": {"choice": ["relu", "gelu"]},
}
SPACE = parse_space(
    {
        "name": "small",
        "family": "mlp",
        "structure": ["arch", "depth"],
        "factors": FACTORS,
        "network": {
            "arch": "=arch",
            "input_features": "=width",
            "output_features": 4,
            "depth": "=depth",
            "activation": "=act",
        },
        "training": {"batch_size": "=batch"},
    }
)


@pytest.mark.parametrize("name", SAMPLERS)
class TestContract:
    def test_the_stream_depends_only_on_space_and_seed(self, name):
        first, second = (list(islice(make_sampler(name).candidates(SPACE, 7), 40)) for _ in range(2))
        assert first == second
        assert first != list(islice(make_sampler(name).candidates(SPACE, 8), 40))

    def test_every_assignment_has_every_factor_and_makes_a_spec(self, name):
        for values in islice(make_sampler(name).candidates(SPACE, 0), 40):
            assert list(values) == list(FACTORS)
            assert SPACE.spec(values).family == "mlp"

    def test_the_description_is_one_short_line(self, name):
        text = make_sampler(name).describe(SPACE)
        assert 0 < len(text) < 120
        assert "\n" not in text


def test_every_pair_of_levels_occurs_equally_often_in_an_orthogonal_sample():
    runs = list(make_sampler("orthogonal").candidates(SPACE, 3))
    assert len(runs) == 16  # L16(4^4 2^1) is in Rao-Hamming's OA(16, 5, 4, 2)
    for a, b in combinations(FACTORS, 2):
        counts = Counter((values[a], values[b]) for values in runs)
        assert len(set(counts.values())) == 1
        assert len(counts) == len({values[a] for values in runs}) * len({values[b] for values in runs})


def test_an_unequal_balance_names_its_factors_in_the_details_only():
    space = parse_space({"name": "odd", "family": "mlp", "factors": {
        **FACTORS, "act": {"choice": ["relu", "gelu", "elu"]}, "norm": {"choice": ["none", "batch", "layer"]},
    }, "network": {}, "training": {}})  # fmt: skip
    sampler = make_sampler("orthogonal")
    assert sampler.describe(space) == "an orthogonal array of 25 runs (all pairs of levels occur in it)"
    assert "from equal (arch x act)" in sampler.details(space)


def test_every_triple_occurs_equally_often_at_strength_three():
    runs = list(make_sampler("orthogonal", strength=3, max_levels=2).candidates(SPACE, 3))
    for names in combinations(FACTORS, 3):
        counts = Counter(tuple(values[name] for name in names) for values in runs)
        assert len(counts) == 8
        assert len(set(counts.values())) == 1


def test_tbem_crosses_structure_with_hyper_parameters_evenly_from_the_start():
    runs = list(make_sampler("tbem").candidates(SPACE, 1))
    assert len(runs) == 16 * 16  # L16(4^2) of structure, L16(4^2 2^1) of the rest
    assert len({tuple(values.values()) for values in runs}) == len(runs)
    shapes = [(values["arch"], values["depth"]) for values in runs]
    for start in range(0, len(runs), 16):
        assert len(set(shapes[start : start + 16])) == 16
    others = [tuple(values[name] for name in ("width", "batch", "act")) for values in runs[:16]]
    assert len(set(others)) == 16


def test_tbem_needs_a_space_that_names_its_structure():
    space = parse_space({"name": "flat", "family": "mlp", "factors": FACTORS, "network": {}, "training": {}})
    with pytest.raises(UserError, match="names its structure factors"):
        next(make_sampler("tbem").candidates(space, 0))


def test_combined_is_orthogonal_first_and_uniform_after():
    combined = list(islice(make_sampler("combined").candidates(SPACE, 5), 40))
    assert combined[:16] == list(make_sampler("orthogonal").candidates(SPACE, 5))
    assert combined[16:] == list(islice(make_sampler("uniform").candidates(SPACE, 5), 24))


@pytest.mark.parametrize(
    ("name", "settings"), [("halton", {}), ("orthogonal", {"strength": 4}), ("uniform", {"strength": 2})]
)
def test_invalid_settings_raise_one_sentence(name, settings):
    with pytest.raises(UserError, match="expected"):
        make_sampler(name, **settings)


def test_coverage_of_an_orthogonal_sample_is_even_and_complete():
    result = coverage(SPACE, make_sampler("orthogonal").candidates(SPACE, 0))
    assert result.rows == 16
    assert result.pairs_covered == 1.0
    assert all(cells.evenness == pytest.approx(1.0) for cells in (*result.factors, *result.pairs))


def test_coverage_counts_missing_levels():
    runs = [values for values in make_sampler("orthogonal").candidates(SPACE, 0) if values["arch"] != "gradual"]
    result = coverage(SPACE, runs)
    arch = next(cells for cells in result.factors if cells.names == ("arch",))
    assert arch.counts == (4, 4, 4, 0)
    assert arch.covered == 0.75
    assert 0 < arch.evenness < 1
    text = coverage_report(result, "an array")
    assert "| arch | 4 | 4 4 4 0 | 75% |" in text
    assert "the least covered first, 10 of 10" in text
    assert sum(" x " in line for line in text.splitlines()) == 10  # every pair of the five factors
    assert "| arch x" in text.splitlines()[-10]
    assert sum(" x " in line for line in coverage_report(result, "an array", 3).splitlines()) == 3


def test_coverage_of_no_configurations_is_zero():
    result = coverage(SPACE, [])
    assert result.rows == 0
    assert result.pairs_covered == 0.0
    assert coverage_report(result, "an array").startswith("# Coverage of 0 configurations")
