"""The classifiers: the contract of estimators, what they learn, and that they learn it from training rows alone."""

import numpy as np
import pytest
import torch
from estimator_contract import NARROW, SavedEstimatorContract
from synthetic_examples import mlp_examples, without_labels

from vramcast.errors import UserError
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings, make_batch, prepare
from vramcast.models.estimators.fitting import PlainFitter, validation_loss

QUICK = PlainFitter(epochs=6, batch_size=32)


class TestMlp(SavedEstimatorContract):
    @staticmethod
    def make():
        return NetworkClassifier(NetworkSettings(bucket_mib=50, width=16, blocks=1), QUICK)


class TestTransformer(SavedEstimatorContract):
    @staticmethod
    def make():
        settings = NetworkSettings(
            network="transformer", bucket_mib=50, width=16, blocks=1, token_width=8, heads=2, layers=1
        )
        return NetworkClassifier(settings, QUICK)


class TestPublishedFeatures(SavedEstimatorContract):
    @staticmethod
    def make():
        return NetworkClassifier(NetworkSettings(features="gpumemnet", bucket_mib=50, width=16, blocks=1), QUICK)

    def test_it_needs_no_simulation(self, fitted, test):
        plain = [type(item)(**{**vars(item), "simulated": None}) for item in test]
        np.testing.assert_array_equal(fitted.predict_bytes(plain), fitted.predict_bytes(test))


@pytest.fixture(scope="module")
def learned():
    settings = NetworkSettings(bucket_mib=50, width=32, blocks=1, dropout=0.0)
    fitter = PlainFitter(epochs=60, batch_size=32, learning_rate=5e-3)
    return NetworkClassifier(settings, fitter).fit(mlp_examples(300), mlp_examples(80, seed=1))


def test_the_gap_is_learned(learned):
    """Small batches take a third more than simulated: who learns that is off by the noise alone."""
    test = [example for example in mlp_examples(100, seed=2) if example.label.fits]
    used = np.array([example.label.used_bytes for example in test])
    plain = np.array([example.overhead_bytes + example.simulated.reserved_bytes for example in test])
    found = learned.predict_bytes(test)
    fits = np.isfinite(found)
    assert fits.mean() > 0.95
    plain_error, error = np.abs(plain / used - 1), np.abs(found / used - 1)
    assert plain_error.mean() > 0.02
    assert error[fits].mean() < 0.6 * plain_error.mean()


def test_jobs_that_do_not_fit_are_told(learned):
    test = mlp_examples(150, seed=3)
    fits = np.array([example.label.fits for example in test])
    told = learned.predict(test, NARROW) == NARROW.classes - 1
    assert 3 < np.sum(~fits) < 100
    assert told[~fits].mean() > 0.8
    assert told[fits].mean() < 0.05


def test_scales_come_from_the_training_examples_alone():
    train = mlp_examples(40)
    settings = NetworkSettings()
    one = prepare(settings, train, mlp_examples(10, seed=1))
    other = prepare(settings, train, mlp_examples(30, seed=2))
    assert one.encoder == other.encoder
    assert (one.center, one.spread) == (other.center, other.spread)


def test_seeds_decide_the_weights_and_nothing_outside():
    train, validation = mlp_examples(40), mlp_examples(20, seed=1)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    makes = [NetworkSettings(width=8, blocks=1, seed=seed) for seed in (1, 1, 2)]
    first, second, third = (NetworkClassifier(make, QUICK).fit(train, validation) for make in makes)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.predict_bytes(validation).tolist() == second.predict_bytes(validation).tolist()
    assert first.predict_bytes(validation).tolist() != third.predict_bytes(validation).tolist()


def test_the_fitter_that_is_given_is_used():
    seen = []

    def fitter(classifier, train, validation):
        seen.append((len(train), len(validation), classifier.loss(train).item()))

    NetworkClassifier(NetworkSettings(width=8), fitter).fit(mlp_examples(20), mlp_examples(10, seed=1))
    assert seen[0][:2] == (20, 10)
    assert np.isfinite(seen[0][2])


def test_the_best_epoch_is_kept():
    train, validation = mlp_examples(60), mlp_examples(30, seed=1)
    losses = []

    class Spy(NetworkClassifier):
        def loss(self, batch):
            value = super().loss(batch)
            if torch.is_inference_mode_enabled():
                losses.append(float(value))
            return value

    fitted = Spy(NetworkSettings(width=8, blocks=1), PlainFitter(epochs=12, learning_rate=0.05)).fit(train, validation)
    tried = min(losses)
    batch = make_batch(fitted.settings, fitted.encoder_, validation)
    assert validation_loss(fitted, batch, 64) == pytest.approx(tried)


def test_training_stops_when_validation_does_not_improve():
    epochs = []

    class Stubborn(NetworkClassifier):
        def loss(self, batch):
            value = super().loss(batch)
            if torch.is_inference_mode_enabled():
                epochs.append(1)
                return torch.tensor(1.0)
            return value

    Stubborn(NetworkSettings(width=8), PlainFitter(epochs=50, patience=4)).fit(
        mlp_examples(20), mlp_examples(9, seed=1)
    )
    assert len(epochs) == 5


def test_examples_without_a_measurement_are_refused():
    with pytest.raises(UserError, match="expected measured examples"):
        NetworkClassifier().fit(without_labels(mlp_examples(10)), mlp_examples(5, seed=1))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"network": "forest"}, "expected network to be one of"),
        ({"features": "all"}, "expected features to be one of"),
        ({"components": 0}, "expected components"),
        ({"dropout": 1.0}, "expected dropout"),
        ({"token_width": 30}, "expected token_width"),
        ({"bucket_weight": -1}, "expected bucket_weight"),
    ],
)
def test_bad_settings_get_a_sentence(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        NetworkSettings(**wrong)


def test_no_examples_get_a_sentence():
    with pytest.raises(UserError, match="expected training and validation examples"):
        NetworkClassifier().fit([], [])
