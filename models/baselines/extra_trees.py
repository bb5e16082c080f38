"""Extremely randomised trees, the regression that GPUMemNet compares its classes with."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from vramcast.errors import UserError
from vramcast.models.baselines._base import Baseline, figures_of
from vramcast.models.baselines._learned import measured_bytes
from vramcast.models.distribution import FigureDistribution, capacities_of
from vramcast.models.example import Example
from vramcast.models.features import feature_set
from vramcast.models.storage import State

TREES = 40
LEAVES = 1000
"""Largest number of leaves: fewer are worse on CNNs, more exceed the size limit of one megabyte."""
_FEATURES = "gpumemnet"
_LEAF = 0
"""Stands for a missing child, because no node has the root as its child."""


class ExtraTrees(Baseline):
    """ExtraTrees on GPUMemNet's features. A job that did not fit counts as one that took the whole device.

    The trees are saved as plain arrays, so that loading needs no pickle. The point estimate is the trees' mean, and
    each tree's figure is a vote for its bucket.
    """

    kind = name = "extra_trees"

    def __init__(self, seed: int = 0, trees: int = TREES, leaves: int = LEAVES) -> None:
        self.seed = seed
        self.trees = trees
        self.leaves = leaves

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Grow the trees; nothing is chosen on the validation examples."""
        used_bytes = np.minimum(measured_bytes(train), capacities_of(train))
        forest = ExtraTreesRegressor(self.trees, max_leaf_nodes=self.leaves, random_state=self.seed)
        self.feature_names_ = list(feature_set(_FEATURES).numbers(train[0]))
        forest.fit(self._matrix(train), used_bytes)
        self.arrays_ = _arrays(forest)
        return self

    def _matrix(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        """Return [examples, features] in scikit-learn's precision."""
        numbers = [feature_set(_FEATURES).numbers(example) for example in examples]
        try:
            rows = [[values[name] for name in self.feature_names_] for values in numbers]
        except KeyError as error:
            raise UserError(f"expected the features {self.feature_names_}, found no {error}: fit it again") from error
        return np.array(rows, dtype=np.float32).reshape(len(examples), len(self.feature_names_))

    def _votes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return [examples, trees]: the figure of each tree."""
        matrix, arrays = self._matrix(examples), self.arrays_
        rows = np.arange(len(examples))[:, None]
        nodes = np.tile(arrays["roots"], (len(examples), 1))
        while True:
            left, right = arrays["left"][nodes], arrays["right"][nodes]
            if not left.any():
                return np.asarray(arrays["bytes"][nodes], dtype=np.float64)
            goes_left = matrix[rows, arrays["feature"][nodes]] <= arrays["threshold"][nodes]
            nodes = np.where(left == _LEAF, nodes, arrays["roots"] + np.where(goes_left, left, right))

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> FigureDistribution:
        """Return the figure of each tree, with their mean as the estimate."""
        votes = self._votes(examples)
        return figures_of(examples, votes, votes.mean(axis=1))

    def state(self) -> State:
        """Return the trees."""
        settings = {"seed": self.seed, "leaves": self.leaves, "features": self.feature_names_}
        return State(settings, self.arrays_)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore the trees."""
        estimator = cls(state.settings["seed"], len(state.arrays["roots"]), state.settings["leaves"])
        estimator.feature_names_, estimator.arrays_ = state.settings["features"], dict(state.arrays)
        return estimator


def _arrays(forest: ExtraTreesRegressor) -> dict[str, NDArray[Any]]:
    """Return the nodes of all trees in a row; children are relative to their tree's root."""
    trees = [estimator.tree_ for estimator in forest.estimators_]
    return {
        "roots": np.cumsum([0, *(tree.node_count for tree in trees[:-1])]).astype(np.int32),
        "left": np.concatenate([np.maximum(tree.children_left, _LEAF) for tree in trees]).astype(np.uint16),
        "right": np.concatenate([np.maximum(tree.children_right, _LEAF) for tree in trees]).astype(np.uint16),
        "feature": np.concatenate([np.maximum(tree.feature, 0) for tree in trees]).astype(np.uint8),
        "threshold": np.concatenate([tree.threshold for tree in trees]).astype(np.float32),
        "bytes": np.concatenate([tree.value[:, 0, 0] for tree in trees]).astype(np.float32),
    }
