"""The contract of estimators: scikit-learn's methods over examples, with a distribution of memory as the result."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets, choose_bucket
from vramcast.models.example import Example
from vramcast.models.outlook import Outlook

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """What an estimator predicts for n examples."""

    point_bytes: Array
    """[n]: infinity for jobs that do not fit."""
    safe_bytes: Array | None
    """[n]: calibrated bounds at the risk, infinity where they do not fit; None from estimators without such bounds."""
    unfamiliar: NDArray[np.bool_]
    """[n]: true for jobs unlike the training examples."""
    proba: Callable[[int, Buckets], Array]
    """[classes] for the example at an index and any buckets."""

    @classmethod
    def of_outlook(cls, outlook: Outlook, risk: float, unfamiliar: NDArray[np.bool_]) -> Self:
        """Return the figures of one distribution for each example."""
        return cls(
            outlook.on_device(0.5),
            outlook.on_device(1 - risk),
            unfamiliar,
            lambda index, buckets: outlook.proba(buckets, [index])[0],
        )


class Estimator(ABC):
    """Predicts how much of a device a job uses. Learned attributes end in an underscore."""

    name: str

    @property
    def needs_simulation(self) -> bool:
        """Whether examples need a simulated measurement; otherwise a layer table is enough."""
        return True

    @property
    def least_risk(self) -> float:
        """The smallest risk that `safe_bytes` supports."""
        return 0.0

    @abstractmethod
    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Learn from labelled examples; epochs and degrees are chosen on `validation`."""

    @abstractmethod
    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> Array:
        """Return [examples, classes]: the probability of each bucket; the last class is "does not fit"."""

    @abstractmethod
    def predict_bytes(self, examples: Sequence[Example]) -> Array:
        """Return [examples]: the point estimate on the device, infinity for jobs that do not fit."""

    def predict(self, examples: Sequence[Example], buckets: Buckets) -> NDArray[np.int64]:
        """Return [examples]: the predicted bucket."""
        return choose_bucket(self.predict_proba(examples, buckets))

    def safe_bytes(self, examples: Sequence[Example], risk: float) -> Array | None:
        """Return [examples]: bounds that a job exceeds with at most this probability, calibrated on other jobs.

        None from an estimator without such bounds. An answer then holds the quantile of its own `predict_proba`.
        """
        return None

    def predict_all(self, examples: Sequence[Example], risk: float) -> Prediction:
        """Return point estimates, bounds and distributions together, which costs some estimators one pass only."""
        return Prediction(
            self.predict_bytes(examples),
            self.safe_bytes(examples, risk),
            np.zeros(len(examples), dtype=np.bool_),
            lambda index, buckets: self.predict_proba([examples[index]], buckets)[0],
        )

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the learned state as safetensors and JSON."""

    @classmethod
    @abstractmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory that `save` wrote; raise a UserError for a damaged or foreign one."""
