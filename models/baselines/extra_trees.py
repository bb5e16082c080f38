"""Extremely randomised trees, the regression that GPUMemNet compares its classes with."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._base import Baseline, figures_of
from vramcast.models.baselines._learned import measured_bytes
from vramcast.models.distribution import FigureDistribution, capacities_of
from vramcast.models.example import Example
from vramcast.models.features import feature_set
from vramcast.models.trees import Trees

TREES = 40
LEAVES = 1000
"""Largest number of leaves: fewer are worse on CNNs, more need more than a megabyte."""
_FEATURES = "gpumemnet"


class ExtraTrees(Baseline):
    """ExtraTrees on GPUMemNet's features. A job that did not fit counts as one that took the whole device.

    The point estimate is the trees' mean, and each tree's figure is a vote for its bucket.
    """

    name = "extra_trees"

    def __init__(self, seed: int = 0, trees: int = TREES, leaves: int = LEAVES) -> None:
        self.seed = seed
        self.trees = trees
        self.leaves = leaves

    trees_: Trees

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Grow the trees; nothing is chosen on the validation examples."""
        used_bytes = np.minimum(measured_bytes(train), capacities_of(train))
        self.trees_ = Trees.fit(_matrix(train), used_bytes, self.trees, self.seed, max_leaf_nodes=self.leaves)
        return self

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> FigureDistribution:
        """Return the figure of each tree, with their mean as the estimate."""
        votes = self.trees_.predict(_matrix(examples)).astype(np.float64)
        return figures_of(examples, votes, votes.mean(axis=1))


def _matrix(examples: Sequence[Example]) -> NDArray[np.float64]:
    """Return [examples, features]."""
    rows = [list(feature_set(_FEATURES).numbers(example).values()) for example in examples]
    return np.array(rows, dtype=np.float64).reshape(len(examples), -1 if rows else 0)
