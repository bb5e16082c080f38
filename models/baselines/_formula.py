"""Formulas: baselines that compute one figure and learn nothing."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._base import Baseline
from vramcast.models.baselines._learned import capacity_bytes
from vramcast.models.buckets import Buckets
from vramcast.models.example import Example
from vramcast.models.storage import State


def one_hot(classes: NDArray[np.int64], buckets: Buckets) -> NDArray[np.float64]:
    """Return [examples, classes] with all probability on one class each."""
    return np.eye(buckets.classes)[classes]


def infinite_beyond_capacity(used_bytes: NDArray[np.float64], examples: Sequence[Example]) -> NDArray[np.float64]:
    """Replace figures that reach the capacity by infinity."""
    return np.where(used_bytes >= capacity_bytes(examples), np.inf, used_bytes)


class Formula(Baseline):
    """An estimator that computes one figure from an example."""

    @abstractmethod
    def used_bytes(self, example: Example) -> float:
        """Return the figure, regardless of the capacity."""

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Return the formula, which has nothing to learn."""
        return self

    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return the figure of each example, infinity where it reaches the capacity."""
        figures = np.array([self.used_bytes(example) for example in examples], dtype=np.float64)
        return infinite_beyond_capacity(figures, examples)

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """Return probability 1 for the bucket of the figure."""
        return one_hot(buckets.of(self.predict_bytes(examples)), buckets)

    def state(self) -> State:
        """Return an empty state."""
        return State({}, {})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return the formula."""
        return cls()
