"""The learned scale of errors: it equals the library's trees, finds jobs with large errors, and survives storage."""

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor

from vramcast.models.error_scale import fit_scale, scales_of, scales_of_other_folds
from vramcast.models.trees import Trees


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(600, 5))
    errors = np.where(matrix[:, 1] > 0.5, generator.uniform(0, 0.6, 600), generator.normal(0, 0.001, 600))
    return matrix, errors


def test_predictions_are_those_of_the_library(rows):
    matrix, errors = rows
    scale = fit_scale(matrix, errors, seed=3)
    trees = ExtraTreesRegressor(60, min_samples_leaf=4, max_features=1.0, random_state=3)
    trees.fit(matrix.astype(np.float32), np.clip(errors, 0, 1))
    others = np.random.default_rng(1).normal(size=(50, 5))
    assert scales_of(scale, others) == pytest.approx(trees.predict(others.astype(np.float32)), abs=1e-6)


def test_jobs_with_large_errors_are_told_from_others_by_designs_not_seen(rows):
    matrix, errors = rows
    designs = [str(index // 3) for index in range(len(matrix))]
    scales = scales_of_other_folds(matrix, errors, designs, seed=0)
    large = matrix[:, 1] > 0.5
    assert scales[large].mean() > 10 * scales[~large].mean()
    own = scales_of(fit_scale(matrix, errors, seed=0), matrix)
    assert abs(errors[large] - own[large]).mean() < abs(errors[large] - scales[large]).mean()  # it has seen these


def test_stored_trees_predict_the_same(rows):
    trees = fit_scale(*rows, seed=0)
    again = Trees.of_arrays(trees.arrays())
    assert np.array_equal(again.predict(rows[0]), trees.predict(rows[0]))


def test_one_huge_error_does_not_decide(rows):
    matrix, errors = rows
    outlier = errors.copy()
    outlier[0] = 1e6
    assert scales_of(fit_scale(matrix, outlier, seed=0), matrix).max() <= 1
