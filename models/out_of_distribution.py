"""Detection of jobs out of distribution, by the distance to the nearest training examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.example import Example

Matrix = NDArray[np.float64]

_NEIGHBOURS = 5
_REFERENCES = 256
"""Training examples that are stored as reference: enough to cover the set, few enough to ship."""
_INSIDE = 0.995
"""The share of validation examples that count as in distribution."""
_LEAST_THRESHOLD = 1e-9
"""Instead of 0, which equal examples have."""
_SLACK = 1.1
"""Factor on the threshold, because a few hundred validation examples underestimate it."""


@dataclass(frozen=True)
class OutOfDistribution:
    """Encoded training examples, and the distance from which a job is out of distribution."""

    reference: NDArray[np.float32]  # [references, features]
    threshold: float

    @classmethod
    def fit(cls, train: Matrix, validation: Matrix, seed: int) -> Self:
        """Choose reference examples, and set the threshold on validation examples."""
        rows = np.random.default_rng(seed).permutation(len(train))[:_REFERENCES]
        unbounded = cls(train[np.sort(rows)].astype(np.float32), np.inf)
        return cls(unbounded.reference, _SLACK * float(np.quantile(unbounded.distances(validation), _INSIDE)))

    def distances(self, matrix: Matrix) -> Matrix:
        """Return [n]: the mean distance to the nearest reference examples."""
        reference = self.reference.astype(np.float64)
        squares = (reference**2).sum(axis=1) - 2 * matrix @ reference.T  # without each job's own square
        nearest = np.argpartition(squares, min(_NEIGHBOURS, len(reference)) - 1, axis=1)[:, :_NEIGHBOURS]
        return np.asarray(np.linalg.norm(matrix[:, None] - reference[nearest], axis=2).mean(axis=1))

    def ratios(self, matrix: Matrix) -> Matrix:
        """Return [n]: the distance of each job relative to the threshold."""
        return self.distances(matrix) / max(self.threshold, _LEAST_THRESHOLD)


def flags_of(ratios: Matrix, examples: Sequence[Example]) -> NDArray[np.bool_]:
    """Return [n]: true for far jobs, and for ranks and runs without training, on which no checkpoint was calibrated."""
    others = np.array([example.is_rank or example.is_inference for example in examples], dtype=np.bool_)
    return np.asarray((ratios > 1) | others)
