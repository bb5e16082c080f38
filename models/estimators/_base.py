"""The contract of estimators: scikit-learn's methods over examples, with a distribution of memory as the result."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets, choose_bucket
from vramcast.models.distribution import Distribution
from vramcast.models.example import Example
from vramcast.models.storage import State, read_state, write_state

Array = NDArray[np.float64]


class Estimator(ABC):
    """Predicts how much of a device a job uses. Learned attributes end in an underscore."""

    name: str

    @property
    def needs_simulation(self) -> bool:
        """True if examples need a simulated measurement; otherwise a layer table is enough."""
        return True

    @property
    def least_risk(self) -> float:
        """The smallest risk that `safe_bytes` supports."""
        return 0.0

    @abstractmethod
    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Learn from labelled examples; epochs and degrees are chosen on `validation`."""

    @abstractmethod
    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> Distribution:
        """Return the distributions of the memory of examples.

        With a risk, their quantile at 1 - risk is a bound that a job exceeds with at most this probability, calibrated
        on other jobs. An estimator without such bounds ignores the risk, and its distributions are not `calibrated`.
        """

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> Array:
        """Return [examples, classes]: the probability of each bucket; the last class is "does not fit"."""
        return self.distribution(examples).proba(buckets)

    def predict(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.int64]:
        """Return [examples]: the predicted bucket."""
        return choose_bucket(self.predict_proba(examples, buckets))

    def predict_bytes(self, examples: Sequence[Example]) -> Array:
        """Return [examples]: the point estimate on the device, infinity for jobs that do not fit."""
        return self.distribution(examples).point_bytes()

    def safe_bytes(self, examples: Sequence[Example], risk: float) -> Array | None:
        """Return [examples]: bounds that a job exceeds with at most this probability; infinity if they do not fit.

        None from an estimator without calibrated bounds.
        """
        distribution = self.distribution(examples, risk)
        return distribution.on_device(1 - risk) if distribution.calibrated else None


class SavedEstimator(Estimator):
    """An estimator that a checkpoint holds."""

    kind: ClassVar[str]
    """The kind of estimator, which a checkpoint names."""

    @abstractmethod
    def state(self) -> State:
        """Return the learned state."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """Restore an estimator from its state."""

    def save(self, directory: Path) -> None:
        """Write the state as safetensors and JSON."""
        write_state(directory, self.kind, self.state())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory that `save` wrote; raise a UserError for a damaged or foreign one."""
        return cls.from_state(read_state(directory, cls.kind))
