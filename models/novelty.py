"""Out-of-distribution detection by the distance to the nearest training examples."""

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
_FAMILIAR = 0.995
"""The share of validation examples that count as familiar."""
_LEAST_THRESHOLD = 1e-9
"""Instead of 0, which equal examples have."""
_SLACK = 1.1
"""Factor on the threshold, because a few hundred validation examples underestimate it."""


@dataclass(frozen=True)
class Novelty:
    """Encoded training examples, and the distance from which a job counts as unfamiliar."""

    reference: NDArray[np.float32]  # [references, features]
    threshold: float

    @classmethod
    def fit(cls, train: Matrix, validation: Matrix, seed: int) -> Self:
        """Choose reference examples, and set the threshold on validation examples."""
        rows = np.random.default_rng(seed).permutation(len(train))[:_REFERENCES]
        unbounded = cls(train[np.sort(rows)].astype(np.float32), np.inf)
        return cls(unbounded.reference, _SLACK * float(np.quantile(unbounded.distances(validation), _FAMILIAR)))

    def distances(self, matrix: Matrix) -> Matrix:
        """Return [n]: the mean distance to the nearest reference examples."""
        gaps = np.linalg.norm(matrix[:, None] - self.reference[None].astype(np.float64), axis=2)
        nearest = np.sort(gaps, axis=1)[:, :_NEIGHBOURS]
        return np.asarray(nearest.mean(axis=1))

    def ratios(self, matrix: Matrix) -> Matrix:
        """Return [n]: the distance of each job relative to that of unfamiliar ones."""
        return self.distances(matrix) / max(self.threshold, _LEAST_THRESHOLD)

    def flags(self, matrix: Matrix) -> NDArray[np.bool_]:
        """Return [n]: true for unfamiliar jobs."""
        return self.ratios(matrix) > 1


def are_ranks(examples: Sequence[Example]) -> NDArray[np.bool_]:
    """Return [n]: true for ranks of a distributed run, which are unfamiliar: no checkpoint was calibrated on ranks."""
    return np.array([example.is_rank for example in examples], dtype=np.bool_)
