"""Estimators that predict a forecast, from which buckets, quantiles and point estimates follow."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets
from vramcast.models.estimators._base import Estimator
from vramcast.models.estimators.forecast import Forecast
from vramcast.models.example import Example
from vramcast.models.storage import State, read_state, write_state


class Forecaster(Estimator):
    """An estimator with a distribution for each example and a state that can be saved."""

    kind: ClassVar[str]
    """The kind of estimator, which a checkpoint names."""

    @abstractmethod
    def forecast(self, examples: Sequence[Example]) -> Forecast:
        """Return the distribution of the memory of each example."""

    @abstractmethod
    def state(self) -> State:
        """Return the learned state."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """Restore an estimator from its state."""

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.float64]:
        """Return [examples, classes]: differences of the distribution function, for any bucket width."""
        return self.forecast(examples).proba(buckets)

    def predict_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return [examples]: the median; infinity for jobs that do not fit."""
        return self.forecast(examples).median_bytes()

    def save(self, directory: Path) -> None:
        """Write the state as safetensors and JSON."""
        write_state(directory, self.kind, self.state())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory that `save` wrote; raise a UserError for a damaged or foreign one."""
        return cls.from_state(read_state(directory, cls.kind))
