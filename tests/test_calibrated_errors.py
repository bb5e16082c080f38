"""Calibrated errors: coverage on exchangeable data, stratum by stratum, and what happens with few rows."""

import numpy as np
import pytest

from vramcast.errors import UserError
from vramcast.models.calibration import CalibratedErrors, with_tail
from vramcast.models.distribution import score_quantile


def of(**scores):
    return CalibratedErrors.fit((name, float(value)) for name, values in scores.items() for value in values)


def margin(errors, strata, risk):
    return score_quantile(with_tail(errors.scores[errors.stratum_of(strata, risk)]), 1 - risk)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_coverage_on_exchangeable_scores(risk):
    """Over many draws of calibration and test rows the bound is exceeded at most as often as was asked."""
    random = np.random.default_rng(0)
    shares = []
    for _ in range(300):
        drawn = random.standard_t(2, size=400)  # heavy tails: no density would be right
        shares.append(np.mean(drawn[300:] <= margin(of(a=drawn[:300]), ["a"], risk)))
    assert 1 - risk - 0.005 < np.mean(shares) < 1 - risk + 0.01


def test_strata_have_bounds_of_their_own():
    random = np.random.default_rng(1)
    errors = of(calm=random.normal(size=500), wild=5 * random.normal(size=500))
    fresh = {"calm": random.normal(size=4000), "wild": 5 * random.normal(size=4000)}
    for name, values in fresh.items():
        assert 0.925 < np.mean(values <= margin(errors, [name], 0.05)) < 0.975


def test_the_rank_by_hand():
    """The 95th of 99 for a risk of 5 %: ceil(100 * 0.95) = 95."""
    errors = of(a=range(99))
    assert margin(errors, ["a"], 0.05) == 94
    assert margin(errors, ["a"], 0.5) == 49


def test_a_stratum_with_few_rows_or_none_is_replaced_by_the_next():
    errors = of(many=range(99), few=[1000], all=[*range(99), 1000])
    assert margin(errors, ["few", "all"], 0.05) == margin(errors, ["new", "all"], 0.05) == 95
    assert margin(errors, ["many", "all"], 0.05) == 94
    assert errors.stratum_of(["few", "many"], 0.001) == "many"  # the largest of the job's


def test_a_job_rarer_than_the_rows_has_twice_the_largest_error():
    assert margin(of(a=range(50)), ["a"], 0.001) == 98
    assert margin(of(a=[-3.0] * 50), ["a"], 0.001) == -3


def test_too_few_rows_for_a_risk_get_a_sentence():
    errors = of(a=range(50))
    assert errors.least_risk == 1 / 51
    errors.check_risk(errors.least_risk)
    with pytest.raises(UserError, match=r"expected 99 calibration rows or more for a risk of 0.01, found 50"):
        errors.check_risk(0.01)
    of(a=range(99)).check_risk(0.01)


@pytest.mark.parametrize("risk", [0, 1, -0.1])
def test_a_risk_is_between_zero_and_one(risk):
    with pytest.raises(UserError, match="expected a risk"):
        of(a=[1.0]).check_risk(risk)


def test_no_rows_get_a_sentence():
    with pytest.raises(UserError, match="expected calibration examples"):
        CalibratedErrors.fit([])
