"""The majority class, which ignores the job."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from vramcast.models.baselines._base import Baseline
from vramcast.models.baselines._learned import measured_bytes
from vramcast.models.distribution import FigureDistribution, bounds_of
from vramcast.models.example import Example
from vramcast.models.storage import State


class Majority(Baseline):
    """Predicts the distribution of the training set over the buckets for every job."""

    kind = name = "majority"

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Store the labels; jobs that did not fit count as infinity."""
        self.used_bytes_ = np.sort(measured_bytes(train))
        return self

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> FigureDistribution:
        """Return the labels for every job, and their upper median, because one of two in the middle may be infinity."""
        median = self.used_bytes_[len(self.used_bytes_) // 2]
        return FigureDistribution(
            **bounds_of(examples),
            figures_bytes=self.used_bytes_[None],
            estimate_bytes=np.full(len(examples), median),
        )

    def state(self) -> State:
        """Return the labels."""
        return State({}, {"used_bytes": self.used_bytes_})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore the baseline."""
        estimator = cls()
        estimator.used_bytes_ = state.arrays["used_bytes"]
        return estimator
