"""The majority class, which ignores the job."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from vramcast.models.baselines._base import Baseline
from vramcast.models.baselines._learned import measured_bytes
from vramcast.models.distribution import FigureDistribution, bounds_of
from vramcast.models.example import Example


class Majority(Baseline):
    """Predicts the distribution of the training set over the buckets for every job."""

    name = "majority"

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
