"""What the formulas share: nothing to learn, and one figure as the whole answer."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._kept import Baseline
from vramcast.models.baselines._learned import capacity_bytes
from vramcast.models.buckets import Buckets
from vramcast.models.example import Example
from vramcast.models.storage import State


def one_hot(classes: NDArray[np.int64], buckets: Buckets) -> NDArray[np.float64]:
    """All probability on one class each: [examples, classes]."""
    return np.eye(buckets.classes)[classes]


def beyond_the_card_is_infinity(used_bytes: NDArray[np.float64], examples: Sequence[Example]) -> NDArray[np.float64]:
    """What reaches the capacity does not fit."""
    return np.where(used_bytes >= capacity_bytes(examples), np.inf, used_bytes)


class Formula(Baseline):
    """An estimator that computes one figure from an example, and is sure of it."""

    @abstractmethod
    def used_bytes(self, example: Example) -> float:
        """The figure, with no regard to the card."""

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """A formula has nothing to learn."""
        return self

    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """The figure of each example, infinity where it reaches the card."""
        found = np.array([self.used_bytes(example) for example in examples], dtype=np.float64)
        return beyond_the_card_is_infinity(found, examples)

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """All on the bucket of the figure."""
        return one_hot(buckets.of(self.predict_bytes(examples)), buckets)

    def state(self) -> State:
        """Its name says it all."""
        return State({}, {})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The formula."""
        return cls()
