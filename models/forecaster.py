"""Estimators whose answer is a forecast: buckets, quantiles and point estimates all follow from it."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models._base import Estimator
from vramcast.models.buckets import Buckets
from vramcast.models.example import Example
from vramcast.models.forecast import Forecast
from vramcast.models.storage import State, read_state, write_state


class Forecaster(Estimator):
    """Has a distribution for each example, and a state that can be written down."""

    kind: ClassVar[str]
    """By which a checkpoint says what it holds."""

    @abstractmethod
    def forecast(self, examples: Sequence[Example]) -> Forecast:
        """The distribution of the memory of each example."""

    @abstractmethod
    def state(self) -> State:
        """What was learned."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """The estimator that a state was taken of."""

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """[examples, classes]: differences of the distribution function, so any width will do."""
        return self.forecast(examples).proba(buckets)

    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """[examples]: the median; infinity for what does not fit."""
        return self.forecast(examples).median_bytes()

    def save(self, directory: Path) -> None:
        """Write the state as safetensors and JSON."""
        write_state(directory, self.kind, self.state())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read what `save` wrote; a damaged or foreign directory is refused with a sentence."""
        return cls.from_state(read_state(directory, cls.kind))
