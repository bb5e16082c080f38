"""Mixtures of logistics: they are densities, buckets come out of them consistently, and tails do not cancel."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vramcast.models.estimators.density import LEAST_SCALE, Mixture, mixed

OUTPUTS = st.lists(st.floats(-4, 4), min_size=10, max_size=10)  # of a network, for three components
quick = settings(settings.get_profile("torch"), max_examples=40)


def mixture(*outputs, center=0.0, spread=1.0):
    return Mixture.of_outputs(torch.tensor(outputs, dtype=torch.float64), center, spread)


def one_logistic(location, scale, atom=0.0):
    weights = torch.tensor([[1 - atom, atom]], dtype=torch.float64).log()
    return Mixture(weights, torch.tensor([[location]]).double(), torch.tensor([[scale]]).double())


def column(value):
    return torch.tensor([value], dtype=torch.float64)


@given(OUTPUTS)
@quick
def test_narrow_intervals_sum_up_to_all_that_is_finite(outputs):
    found = mixture(outputs)
    reach = float((found.locations.abs() + 60 * found.scales).max())
    edges = torch.linspace(-reach, reach, 2001, dtype=torch.float64)
    wide = mixture(*[outputs] * 2000)
    masses = wide.log_mass(edges[:-1], edges[1:]).exp()
    assert float(masses.sum() + found.log_weights[0, -1].exp()) == pytest.approx(1, abs=1e-9)


@given(OUTPUTS, st.floats(-5, 5), st.floats(0.01, 3), st.floats(0.01, 3))
@quick
def test_neighbouring_intervals_add_up_and_agree_with_the_distribution_function(outputs, start, first, second):
    found = mixture(outputs)
    a, b, c = column(start), column(start + first), column(start + first + second)
    parts = found.log_mass(a, b).exp() + found.log_mass(b, c).exp()
    assert float(parts) == pytest.approx(float(found.log_mass(a, c).exp()), abs=1e-12)
    below = found.cdf(torch.stack([a, c], dim=1))
    assert float(parts) == pytest.approx(float(below[0, 1] - below[0, 0]), abs=1e-12)
    assert float(found.log_survival(c).exp()) == pytest.approx(1 - float(below[0, 1]), abs=1e-12)


def test_a_logistic_by_hand():
    found = one_logistic(2.0, 0.5, atom=0.2)
    assert float(found.cdf(column(2.0)[None])) == pytest.approx(0.4)
    assert float(found.cdf(column(math.inf)[None])) == pytest.approx(0.8)
    assert float(found.cdf(column(-math.inf)[None])) == 0
    assert float(found.log_survival(column(2.5)).exp()) == pytest.approx(0.2 + 0.8 / (1 + math.e))


def test_far_out_in_the_tails_nothing_cancels():
    found = one_logistic(0.0, 0.01)
    log_mass = float(found.log_mass(column(10.0), column(10.01)))
    assert log_mass == pytest.approx(-1000 + math.log(1 - math.exp(-1)))
    assert float(found.log_survival(column(10.0))) == pytest.approx(-1000)


def test_gradients_are_finite_wherever_the_truth_lies():
    outputs = torch.zeros(3, 10, requires_grad=True)
    found = Mixture.of_outputs(outputs, 0.0, 0.01)
    bounds = torch.tensor([-50.0, 0.0, 50.0])
    (found.log_mass(bounds, bounds + 1e-3) + found.log_survival(bounds)).sum().backward()
    assert bool(outputs.grad.isfinite().all())
    assert bool(outputs.grad.abs().sum(1).gt(0).all())


@given(OUTPUTS, st.floats(0.001, 0.999))
@quick
def test_a_quantile_has_its_level_below_it(outputs, level):
    found = mixture(outputs)
    value = found.quantile(level)
    if math.isinf(float(value)):
        assert 1 - float(found.log_weights[0, -1].exp()) <= level
    else:
        assert float(found.cdf(value[:, None])) == pytest.approx(level, abs=1e-9)


def test_quantiles_reach_infinity_where_the_atom_does():
    found = one_logistic(0.0, 1.0, atom=0.4)
    assert float(found.quantile(0.3)) == pytest.approx(0.0)
    assert math.isinf(float(found.quantile(0.6)))
    assert math.isfinite(float(found.given_finite().quantile(0.99)))


def test_a_mixture_of_mixtures_is_their_average():
    parts = [one_logistic(0.0, 1.0), one_logistic(3.0, 0.2, atom=0.5)]
    points = torch.linspace(-5, 5, 21, dtype=torch.float64)[None]
    average = (parts[0].cdf(points) + parts[1].cdf(points)) / 2
    torch.testing.assert_close(mixed(parts).cdf(points), average)
    assert float(mixed(parts).log_weights.exp().sum()) == pytest.approx(1)


def test_shifts_and_temperatures():
    found = one_logistic(1.0, 0.5)
    assert float(found.shifted(column(2.0)).quantile(0.5)) == pytest.approx(3.0)
    spread = [float(item.quantile(0.9) - item.quantile(0.1)) for item in (found, found.tempered(2.0))]
    assert spread[1] == pytest.approx(2 * spread[0])


def test_outputs_are_in_units_of_the_spread():
    bias = Mixture.first_bias(3)
    assert len(bias) == Mixture.outputs_of(3)
    found = Mixture.of_outputs(bias[None].double(), center=7.0, spread=0.1)
    assert float(found.locations.mean()) == pytest.approx(7.0)
    assert LEAST_SCALE < float(found.scales.max()) < 0.1
    assert float(found.log_weights[0, -1].exp()) < 0.1
