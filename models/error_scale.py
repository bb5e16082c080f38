"""The usual error of a simulation, learned from measured jobs by extremely randomised trees.

The trees do not correct an estimate. They tell jobs whose workspaces a rule guesses well from jobs whose workspaces it
does not, so that the margin of a few jobs does not apply to all.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vramcast.models.trees import Trees

Array = NDArray[np.float64]

_TREES = 60
_LEAST_LEAF = 4
_FEATURE_SHARE = 1.0
_FOLDS = 10
_MOST_ERROR = 1.0
"""Larger relative errors count as this one: a single row would decide the mean of its leaf."""


def fit_scale(matrix: Array, relative_errors: Array, seed: int) -> Trees:
    """Fit trees to the errors above an estimate, relative to it; [n, features] and [n]."""
    errors = np.clip(relative_errors, 0, _MOST_ERROR)
    return Trees.fit(matrix, errors, _TREES, seed, min_samples_leaf=_LEAST_LEAF, max_features=_FEATURE_SHARE)


def scales_of(trees: Trees, matrix: Array) -> Array:
    """Return [n]: the usual error above the estimate, relative to it."""
    return np.asarray(trees.predict(matrix).mean(axis=1), dtype=np.float64)


def scales_of_other_folds(matrix: Array, relative_errors: Array, designs: Sequence[str], seed: int) -> Array:
    """Return [n]: the usual errors of rows, by trees that have seen no row of the same design."""
    from vramcast.dataset_builder.store.splits import make_folds  # noqa: PLC0415 - answers need no splits

    split = make_folds(designs, min(_FOLDS, len(set(designs))), seed)
    parts = np.array([split.part_of(design) for design in designs])
    scales = np.zeros(len(matrix))
    for part in split.parts:
        own = parts == part
        scales[own] = scales_of(fit_scale(matrix[~own], relative_errors[~own], seed), matrix[own])
    return scales
