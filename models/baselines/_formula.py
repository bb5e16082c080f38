"""What the formulas share: nothing to learn, and one figure as the whole answer."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from models._base import Estimator
from models.baselines._state import read_state, write_state
from models.example import Example
from models.labels import Buckets


def one_hot(classes: NDArray[np.int64], buckets: Buckets) -> NDArray[np.float64]:
    """All probability on one class each: [examples, classes]."""
    return np.eye(buckets.classes)[classes]


def beyond_the_card_is_infinity(used_bytes: NDArray[np.float64], examples: Sequence[Example]) -> NDArray[np.float64]:
    """What reaches the capacity does not fit."""
    capacity_bytes = np.array([example.capacity_bytes for example in examples], dtype=np.float64)
    return np.where(used_bytes >= capacity_bytes, np.inf, used_bytes)


class Formula(Estimator):
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

    def save(self, directory: Path) -> None:
        """Write down which formula it is."""
        write_state(directory, self.name)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The formula, if that is the one that was saved."""
        read_state(directory, cls.name)
        return cls()
