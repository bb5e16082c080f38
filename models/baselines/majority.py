"""The majority class, which ignores the job."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._base import Baseline
from vramcast.models.baselines._learned import measured_bytes
from vramcast.models.buckets import Buckets
from vramcast.models.example import Example
from vramcast.models.storage import State


class Majority(Baseline):
    """Predicts the distribution of the training set over the buckets for every job."""

    name = "majority"

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Store the labels; jobs that did not fit count as infinity."""
        self.used_bytes_ = np.sort(measured_bytes(train))
        return self

    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return the upper median of the labels, because one of two in the middle may be infinity."""
        return np.full(len(examples), self.used_bytes_[len(self.used_bytes_) // 2])

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """Return the share of each bucket in the training set."""
        counts = np.bincount(buckets.of(self.used_bytes_), minlength=buckets.classes)
        return np.tile(counts / len(self.used_bytes_), (len(examples), 1))

    def state(self) -> State:
        """Return the labels."""
        return State({}, {"used_bytes": self.used_bytes_})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore the baseline."""
        estimator = cls()
        estimator.used_bytes_ = state.arrays["used_bytes"]
        return estimator
