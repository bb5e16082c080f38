"""Whether a job is unlike all that an estimator was trained on: its distance to the nearest training examples."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_NEIGHBOURS = 5
_KEPT = 256
"""Training examples that are kept to measure distances: enough to cover the set, small enough to ship."""
_FAMILIAR = 0.995
"""The share of validation examples that count as familiar."""
_SLACK = 1.1
"""On the threshold: a few hundred validation examples do not show how far familiar ones can lie."""


@dataclass(frozen=True)
class Novelty:
    """Encoded training examples, and the distance to them from which a job counts as unlike them."""

    reference: NDArray[np.float32]  # [kept, features]
    threshold: float

    @classmethod
    def fit(cls, train: Matrix, validation: Matrix, seed: int) -> Self:
        """Keep some training examples; the threshold is set on validation examples, which are not among them."""
        rows = np.random.default_rng(seed).permutation(len(train))[:_KEPT]
        found = cls(train[np.sort(rows)].astype(np.float32), np.inf)
        return cls(found.reference, _SLACK * float(np.quantile(found.distances(validation), _FAMILIAR)))

    def distances(self, matrix: Matrix) -> Matrix:
        """[n]: the mean distance to the nearest few of the kept examples."""
        gaps = np.linalg.norm(matrix[:, None] - self.reference[None].astype(np.float64), axis=2)
        nearest = np.sort(gaps, axis=1)[:, :_NEIGHBOURS]
        return np.asarray(nearest.mean(axis=1))

    def flags(self, matrix: Matrix) -> NDArray[np.bool_]:
        """[n]: true for what is unlike the training set."""
        return self.distances(matrix) > self.threshold
