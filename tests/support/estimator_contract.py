"""The contract of estimators, as tests to inherit: a subclass needs a `make` that returns a new estimator."""

import json
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import pytest
from synthetic_examples import mlp_examples, without_labels

from vramcast.errors import UserError
from vramcast.models import Estimator
from vramcast.models.buckets import Buckets
from vramcast.virtual_gpu.allocator.sizes import MIB

WIDE = Buckets(width_bytes=250 * MIB, capacity_bytes=1000 * MIB)
NARROW = Buckets(width_bytes=50 * MIB, capacity_bytes=1000 * MIB)


class EstimatorContract(ABC):
    """Tests that every estimator must pass."""

    @staticmethod
    @abstractmethod
    def make() -> Estimator:
        """Return an unfitted estimator that is quick to fit."""

    @pytest.fixture(scope="class")
    @classmethod
    def train(cls):
        return mlp_examples(120)

    @pytest.fixture(scope="class")
    @classmethod
    def validation(cls):
        return mlp_examples(40, seed=1)

    @pytest.fixture(scope="class")
    @classmethod
    def test(cls):
        return mlp_examples(40, seed=2)

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls, train, validation):
        estimator = cls.make()
        assert estimator.fit(train, validation) is estimator
        return estimator

    def test_it_has_a_name(self, fitted):
        assert isinstance(fitted.name, str)
        assert fitted.name

    @pytest.mark.parametrize("buckets", [WIDE, NARROW])
    def test_probabilities_are_probabilities(self, fitted, test, buckets):
        found = fitted.predict_proba(test, buckets)
        assert found.shape == (len(test), buckets.classes)
        assert found.min() >= 0
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-9)

    def test_a_wide_bucket_is_its_narrow_ones(self, fitted, test):
        wide, narrow = fitted.predict_proba(test, WIDE), fitted.predict_proba(test, NARROW)
        summed = narrow[:, :-1].reshape(len(test), WIDE.fitting, -1).sum(axis=2)
        np.testing.assert_allclose(wide[:, :-1], summed, atol=1e-9)
        np.testing.assert_allclose(wide[:, -1], narrow[:, -1], atol=1e-9)

    def test_the_answer_is_the_likeliest_bucket_or_a_higher_one_that_is_nearly_as_likely(self, fitted, test):
        found, proba = fitted.predict(test, NARROW), fitted.predict_proba(test, NARROW)
        assert found.dtype == np.int64
        assert np.all(found >= proba.argmax(axis=1))
        assert np.all(proba[np.arange(len(test)), found] >= 0.7 * proba.max(axis=1))

    def test_a_point_estimate_is_memory_of_the_card_or_infinite(self, fitted, test):
        found = fitted.predict_bytes(test)
        capacity = np.array([example.capacity_bytes for example in test])
        assert found.shape == (len(test),)
        assert np.all((found > 0) & ((found <= capacity) | np.isinf(found)))

    def test_answers_need_no_measurement(self, fitted, test):
        blind = without_labels(test)
        np.testing.assert_array_equal(fitted.predict_bytes(blind), fitted.predict_bytes(test))
        np.testing.assert_array_equal(fitted.predict_proba(blind, WIDE), fitted.predict_proba(test, WIDE))

    def test_an_answer_does_not_depend_on_its_neighbours(self, fitted, test):
        together, alone = fitted.predict_bytes(test), [fitted.predict_bytes([item])[0] for item in test]
        np.testing.assert_allclose(together, alone, rtol=1e-4)

    def test_no_examples_have_no_answers(self, fitted):
        assert fitted.predict_proba([], WIDE).shape == (0, WIDE.classes)
        assert fitted.predict_bytes([]).shape == (0,)

    def test_two_fits_say_the_same(self, fitted, train, validation, test):
        again = self.make().fit(train, validation)
        np.testing.assert_array_equal(again.predict_proba(test, NARROW), fitted.predict_proba(test, NARROW))


class SavedEstimatorContract(EstimatorContract):
    """Tests that every estimator of a checkpoint must pass."""

    def test_what_is_saved_says_the_same_bit_for_bit(self, fitted, test, tmp_path):
        fitted.save(tmp_path / "saved")
        again = type(fitted).load(tmp_path / "saved")
        np.testing.assert_array_equal(again.predict_proba(test, NARROW), fitted.predict_proba(test, NARROW))
        np.testing.assert_array_equal(again.predict_bytes(test), fitted.predict_bytes(test))
        assert again.name == fitted.name

    def test_a_directory_without_an_estimator_is_refused(self, fitted, tmp_path):
        with pytest.raises(UserError, match=r"expected .* found .*"):
            type(fitted).load(tmp_path)
        with pytest.raises(UserError, match=r"expected .* found .*"):
            type(fitted).load(tmp_path / "absent")

    def test_a_changed_file_is_refused(self, fitted, tmp_path):
        fitted.save(tmp_path)
        for path in sorted(tmp_path.iterdir()):
            data = path.read_bytes()
            for damage in (data[: len(data) // 2], _with_a_flipped_byte(data), b""):
                path.write_bytes(damage)
                with pytest.raises(UserError, match=r"expected .* found .*"):
                    type(fitted).load(tmp_path)
            path.write_bytes(data)
        type(fitted).load(tmp_path)  # the unchanged files can be read

    def test_json_of_another_kind_is_refused(self, fitted, tmp_path):
        fitted.save(tmp_path)
        record = Path(tmp_path, "estimator.json")
        for values in ({}, [], {**json.loads(record.read_text()), "version": 99}):
            record.write_text(json.dumps(values))
            with pytest.raises(UserError, match=r"expected .* found .*"):
                type(fitted).load(tmp_path)


def _with_a_flipped_byte(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
