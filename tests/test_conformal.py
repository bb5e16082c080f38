"""Safe margins: coverage on exchangeable data, family by family, and what happens with few rows."""

import numpy as np
import pytest

from vramcast.errors import UserError
from vramcast.models.estimators.conformal import SafeMargins, raised, relative, score
from vramcast.virtual_gpu.allocator.sizes import MIB


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_coverage_on_exchangeable_scores(risk):
    """Over many draws of calibration and test rows the bound is exceeded at most as often as was asked."""
    random = np.random.default_rng(0)
    kept = []
    for _ in range(300):
        drawn = random.standard_t(2, size=400)  # heavy tails: no density would be right
        margin = SafeMargins.fit(["a"] * 300, drawn[:300]).margins(["a"], risk)[0]
        kept.append(np.mean(drawn[300:] <= margin))
    assert 1 - risk - 0.005 < np.mean(kept) < 1 - risk + 0.01


def test_families_have_margins_of_their_own():
    random = np.random.default_rng(1)
    scores = np.concatenate([random.normal(size=500), 5 * random.normal(size=500)])
    margins = SafeMargins.fit(["calm"] * 500 + ["wild"] * 500, scores)
    fresh = {"calm": random.normal(size=4000), "wild": 5 * random.normal(size=4000)}
    for family, values in fresh.items():
        covered = np.mean(values <= margins.margins([family], 0.05)[0])
        assert 0.925 < covered < 0.975


def test_the_rank_by_hand():
    """The 19th of 19 for a risk of 5 %: ceil(20 * 0.95) = 19."""
    margins = SafeMargins.fit(["a"] * 19, range(19))
    assert margins.margins(["a"], 0.05)[0] == 18
    assert margins.margins(["a"], 0.5)[0] == 9


def test_a_family_with_few_rows_or_none_uses_all():
    margins = SafeMargins.fit(["many"] * 99 + ["few"], [*range(99), 1000])
    assert margins.margins(["few"], 0.05)[0] == margins.margins(["new"], 0.05)[0] == 95
    assert margins.margins(["many"], 0.05)[0] == 94


def test_margins_never_fall_below_the_median():
    margins = SafeMargins.fit(["a"] * 50, [-3.0] * 50)
    assert margins.margins(["a"], 0.1)[0] == 0
    assert margins.least_risk == 1 / 51


def test_jobs_that_are_said_not_to_fit_count_as_covered():
    margins = SafeMargins.fit(["a"] * 40, [-np.inf] * 30 + [2.0] * 10)
    assert margins.margins(["a"], 0.3)[0] == 0
    assert margins.margins(["a"], 0.1)[0] == 2


def test_too_few_rows_for_a_risk_get_a_sentence():
    margins = SafeMargins.fit(["a"] * 50, range(50))
    with pytest.raises(UserError, match=r"expected 99 calibration rows or more for a risk of 0.01, found 50"):
        margins.margins(["a"], 0.01)


@pytest.mark.parametrize("risk", [0, 1, -0.1])
def test_a_risk_is_between_zero_and_one(risk):
    with pytest.raises(UserError, match="expected a risk"):
        SafeMargins.fit(["a"], [1.0]).margins(["a"], risk)


def test_no_rows_get_a_sentence():
    with pytest.raises(UserError, match="expected calibration examples"):
        SafeMargins.fit([], [])


def test_what_is_raised_by_a_score_is_what_had_it():
    estimated = np.array([10.0, 300.0, 20_000.0]) * MIB
    needed = np.array([60.0, 290.0, 24_000.0]) * MIB
    np.testing.assert_allclose(raised(estimated, score(needed, estimated)), needed)
    assert list(raised(estimated, np.zeros(3))) == pytest.approx(list(estimated))


def test_the_same_excess_weighs_less_the_larger_a_job_but_a_small_one_does_not_set_the_margin():
    small, large = np.array([20.0 * MIB]), np.array([20_000.0 * MIB])
    assert score(small + 100 * MIB, small) > score(large + 100 * MIB, large)
    assert score(6 * small, small) < score(1.25 * large, large)  # 100 MiB of a small job, 5,000 of a large one


def test_nothing_is_above_what_does_not_fit():
    assert score([100.0], [np.inf])[0] == -np.inf
    assert raised([np.inf], [0.1])[0] == np.inf


def test_the_width_of_scores_is_a_wider_one_of_memory_for_small_jobs():
    scale, estimated = 1e-4, np.array([50.0, 50_000.0]) * MIB
    high, low = raised(estimated, [scale, scale]), raised(estimated, [-scale, -scale])
    np.testing.assert_allclose(np.log(high / low) / 2, relative(scale, estimated), rtol=1e-2)
    assert relative(0.02, [1.0]) == relative(0.02, [2.0**20])  # less than a segment is as unsure as a segment
    assert relative(0.02, [1.0]) < 0.5
