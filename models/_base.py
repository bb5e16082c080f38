"""What every estimator owes: scikit-learn's contract over examples, and a distribution of memory as its answer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.example import Example
from vramcast.models.labels import Buckets, told


class Estimator(ABC):
    """Predicts how much of a device a job will use. Learned attributes end in an underscore."""

    name: str

    @abstractmethod
    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Learn from examples with targets; what is chosen (epochs, degrees) is chosen on `validation`."""

    @abstractmethod
    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """[examples, classes]: the probability of each bucket; the last class is "does not fit"."""

    @abstractmethod
    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """[examples]: the point estimate on the device; infinity for what does not fit."""

    def predict(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.int64]:
        """[examples]: the bucket that is told."""
        return told(self.predict_proba(examples, buckets))

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write what was learned as safetensors and JSON."""

    @classmethod
    @abstractmethod
    def load(cls, directory: Path) -> Self:
        """Read what `save` wrote; a damaged or foreign directory is refused with a sentence."""
