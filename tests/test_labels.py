"""What a density is held to: narrow intervals, buckets, and for what did not fit a bound from below."""

import numpy as np
import pytest
import torch
from synthetic_examples import PROFILE, example_of, mlp_spec

from vramcast.models.buckets import Buckets
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings, make_batch
from vramcast.models.estimators.density import Mixture
from vramcast.models.estimators.labels import center_and_spread, gap_labels, gaps_of, intervals
from vramcast.models.estimators.mixture_distribution import MixtureDistribution
from vramcast.models.example import Label
from vramcast.models.features import feature_set
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status

FULL = feature_set("full")


def with_target(used_mib, fits=True, **spec):
    example = example_of(mlp_spec(**spec))
    return type(example)(**{**vars(example), "label": Label(int(used_mib * MIB), fits)})


def test_an_interval_is_a_mib_or_a_quarter_percent():
    lower, upper, fits = intervals([with_target(300), with_target(900)])
    np.testing.assert_allclose(lower / MIB, [299, 900 - 2.25])
    np.testing.assert_allclose(upper / MIB, [301, 900 + 2.25])
    assert fits.all()


def test_what_did_not_fit_is_bounded_by_the_card_and_not_by_where_it_died():
    died = [with_target(700, fits=False), with_target(990, fits=False)]
    lower, _, fits = intervals(died)
    assert not fits.any()
    assert lower.tolist() == [PROFILE.total_mib * MIB - PROFILE.driver_mib * MIB] * 2


def test_a_figure_below_the_overhead_is_the_least_use():
    example = with_target(100)  # the profile's context alone is 200
    lower, upper, _ = intervals([example])
    assert example.overhead_bytes < lower[0] < upper[0] < example.overhead_bytes + 3 * MIB


def test_gaps_are_logarithms_over_the_reference():
    example = example_of(mlp_spec())
    used = example.overhead_bytes + np.e * example.simulated.reserved_bytes
    assert gaps_of(np.array([used]), [example], FULL)[0] == pytest.approx(1.0)
    plain = feature_set("gpumemnet")
    used = example.overhead_bytes + np.e * example.static.total_bytes
    assert gaps_of(np.array([used]), [example], plain)[0] == pytest.approx(1.0)


def test_the_reference_of_what_does_not_fit_in_the_simulation_is_more_than_the_card():
    example = example_of(mlp_spec(width=4000, depth=6))
    assert example.simulated.status is Status.OOM
    assert FULL.reference_bytes(example) > example.capacity_bytes - example.overhead_bytes
    small = example_of(mlp_spec())
    assert FULL.reference_bytes(small) == small.simulated.reserved_bytes


def test_the_bucket_is_the_one_that_holds_the_figure():
    example = with_target(374)
    found = gap_labels([example], FULL, bucket_mib=50)
    edges = gaps_of(np.array([350.0 * MIB, 400.0 * MIB]), [example, example], FULL)
    assert found.bucket_lower.item() == pytest.approx(edges[0], abs=1e-6)
    assert found.bucket_upper.item() == pytest.approx(edges[1], abs=1e-6)


def test_center_and_spread_ignore_what_did_not_fit():
    some = [with_target(400 + index) for index in range(9)]
    alone = center_and_spread(gap_labels(some, FULL, 50))
    with_dead = center_and_spread(gap_labels([*some, with_target(990, fits=False)], FULL, 50))
    assert alone == with_dead


def constant(classifier, outputs):
    """A classifier that says the same of everything."""

    class Constant(torch.nn.Module):
        def forward(self, inputs):
            return torch.tensor([outputs]).expand(len(inputs), -1)

    classifier.network_ = Constant()
    return classifier


def test_the_likelihood_of_what_did_not_fit_is_the_mass_above_the_card():
    """One logistic at the overhead plus the reserved memory, and an atom."""
    examples = [with_target(420, width=900, depth=4), with_target(500, fits=False, width=900, depth=4)]
    settings = NetworkSettings(components=1, bucket_mib=50, bucket_weight=0.0)
    classifier = NetworkClassifier(settings, lambda *_: None).fit(examples, examples)
    classifier.center_, classifier.spread_ = 0.0, 0.2
    constant(classifier, [0.0, -1.0, 0.0, 0.0])
    distribution = classifier.distribution(examples)
    batch = make_batch(settings, classifier.encoder_, examples)
    card = Buckets(50 * MIB, examples[0].capacity_bytes)
    above = -classifier.loss(batch.select(torch.tensor([1])))
    assert float(above.exp()) == pytest.approx(distribution.proba(card)[1, -1], rel=1e-4)
    lower, upper, _ = intervals(examples)
    inside = distribution.mixture.cdf(
        torch.tensor(np.log(np.stack([lower, upper], axis=1) - examples[0].overhead_bytes))
    ).diff(dim=1)
    assert float((-classifier.loss(batch.select(torch.tensor([0])))).exp()) == pytest.approx(inside[0].item(), rel=1e-3)
    likelihood = distribution.log_likelihood(*intervals(examples))
    np.testing.assert_allclose(np.exp(likelihood), [inside[0].item(), distribution.proba(card)[1, -1]], rtol=1e-4)


def test_where_a_job_died_does_not_matter():
    losses = []
    for died_mib in (500, 980):
        examples = [with_target(420), with_target(died_mib, fits=False)]
        classifier = NetworkClassifier(NetworkSettings(), lambda *_: None).fit(examples, examples)
        losses.append(classifier.loss(make_batch(classifier.settings, classifier.encoder_, examples)).item())
    assert losses[0] == losses[1]


def distribution_of(location_mib, scale, example, atom=1e-9):
    gaps = Mixture(
        torch.tensor([[1 - atom, atom]]).double().log(), torch.zeros(1, 1).double(), torch.full((1, 1), scale).double()
    )
    return MixtureDistribution.of_gaps(gaps, [location_mib * MIB], [example])


def test_a_distribution_moves_with_the_overhead_of_the_device():
    example = example_of(mlp_spec())
    elsewhere = type(example)(**{**vars(example), "overhead_bytes": example.overhead_bytes + 100 * MIB})
    here, there = (distribution_of(300, 0.05, item).point_bytes()[0] for item in (example, elsewhere))
    assert here == pytest.approx(example.overhead_bytes + 300 * MIB)
    assert there - here == pytest.approx(100 * MIB)


def test_what_exceeds_the_card_is_infinite():
    example = example_of(mlp_spec())
    assert np.isinf(distribution_of(801, 0.01, example).point_bytes()[0])
    assert np.isfinite(distribution_of(799, 0.01, example).point_bytes()[0])
    assert np.isinf(distribution_of(300, 0.01, example, atom=0.6).point_bytes()[0])


def test_the_own_part_of_a_job_is_without_overhead_and_knows_no_card():
    example = example_of(mlp_spec())
    distribution = distribution_of(5000, 0.05, example)
    assert distribution.own_quantile_bytes(0.5) == pytest.approx([5000 * MIB])
    assert distribution.quantile_bytes(0.5) == pytest.approx([example.overhead_bytes + 5000 * MIB])
    assert np.isinf(distribution.on_device(0.5)[0])
