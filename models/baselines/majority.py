"""The answer that asks nothing: what most jobs take."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._kept import Baseline
from vramcast.models.baselines._learned import measured_bytes
from vramcast.models.buckets import Buckets
from vramcast.models.example import Example
from vramcast.models.storage import State


class Majority(Baseline):
    """The training set's own distribution over the buckets for every job, whose largest class is the answer."""

    name = "majority"

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Remember what was measured; what did not fit counts as infinity."""
        self.used_bytes_ = np.sort(measured_bytes(train))
        return self

    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """The median of what was measured; of two in the middle the upper, since one of them may be infinity."""
        return np.full(len(examples), self.used_bytes_[len(self.used_bytes_) // 2])

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """The share of each bucket in the training set."""
        counts = np.bincount(buckets.of(self.used_bytes_), minlength=buckets.classes)
        return np.tile(counts / len(self.used_bytes_), (len(examples), 1))

    def state(self) -> State:
        """What was measured."""
        return State({}, {"used_bytes": self.used_bytes_})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The majority of what was measured."""
        estimator = cls()
        estimator.used_bytes_ = state.arrays["used_bytes"]
        return estimator
