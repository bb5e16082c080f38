"""An estimator without a network: the simulation, with the errors that it showed on measured jobs.

Networks that learn the gap between simulation and measurement were tried: on networks of unseen designs their errors
are as large as those of the simulation.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vramcast.defaults import RISK
from vramcast.models.buckets import Buckets
from vramcast.models.calibration import CalibratedErrors
from vramcast.models.error_scale import ErrorScale
from vramcast.models.estimators._base import Estimator, Prediction
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.models.example import Example
from vramcast.models.features.full import simulated_need_bytes
from vramcast.models.novelty import Novelty, are_ranks
from vramcast.models.outlook import Outlook, own_bytes_of
from vramcast.models.storage import State, read_state, write_state
from vramcast.models.uncertainty import has_learned_scale

Array = NDArray[np.float64]

_FEATURES = "full"
_TREES = "error scale."
_WIDENING = 0.5
"""Growth of the width with the logarithm of the distance to the calibration jobs."""


class CalibratedSimulation(Estimator):
    """The simulated memory, with a distribution of errors that depends on what is uncertain in a job."""

    kind: ClassVar[str] = "calibrated simulation"
    name = "simulation"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    calibration_: CalibratedErrors
    encoder_: ExampleEncoder
    novelty_: Novelty
    scale_: ErrorScale

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Score the simulations of all examples, in units of the errors that jobs of other designs lead to expect."""
        examples = [*train, *validation]
        need = _need_bytes(examples)
        self.encoder_ = ExampleEncoder.fit(examples, _FEATURES)
        matrix = self.encoder_.matrix(examples)
        self.novelty_ = self._novelty(examples, matrix)
        self.scale_, scales = self._error_scale(examples, matrix, need)
        self.calibration_ = CalibratedErrors.fit(examples, need, scales)
        return self

    def _error_scale(self, examples: Sequence[Example], matrix: Array, need_bytes: Array) -> tuple[ErrorScale, Array]:
        """Return the learned scale of errors, and [n] what it gives for examples that it has not seen."""
        chosen = np.array([has_learned_scale(item) for item in examples])
        if not chosen.any():
            chosen[:] = True
        rows = matrix[chosen]
        errors = (own_bytes_of(examples, need_bytes) / np.maximum(need_bytes, 1) - 1)[chosen]
        designs = [item.design for item, use in zip(examples, chosen, strict=True) if use]
        scales = np.zeros(len(examples))
        scales[chosen] = ErrorScale.of_other_folds(rows, errors, designs, self.seed)
        return ErrorScale.fit(rows, errors, self.seed), scales

    def _novelty(self, examples: Sequence[Example], matrix: Array) -> Novelty:
        """Learn the distance from which a job is unfamiliar, between jobs of different designs."""
        from vramcast.dataset_builder.store.splits import make_split  # noqa: PLC0415 - answers need no splits

        split = make_split([item.design for item in examples], {"apart": 0.3, "reference": 0.7}, self.seed)
        apart = np.array([split.part_of(item.design) == "apart" for item in examples])
        return Novelty.fit(matrix[~apart], matrix[apart], self.seed)

    def outlook(self, examples: Sequence[Example], risk: float = RISK) -> Outlook:
        """Return the distributions of the memory of jobs, whose quantile at 1 - risk is the calibrated bound."""
        matrix = self.encoder_.matrix(examples)
        return self._outlook(examples, risk, matrix, self.novelty_.ratios(matrix))

    def _outlook(self, examples: Sequence[Example], risk: float, matrix: Array, ratios: Array) -> Outlook:
        widening = 1 + _WIDENING * np.log(np.maximum(ratios, 1))
        return self.calibration_.outlook(examples, _need_bytes(examples), risk, self.scale_.predict(matrix), widening)

    def predict_all(self, examples: Sequence[Example], risk: float) -> Prediction:
        """Return point estimates, bounds and distributions, all from one outlook."""
        matrix = self.encoder_.matrix(examples)
        ratios = self.novelty_.ratios(matrix)
        unfamiliar = (ratios > 1) | are_ranks(examples)
        return Prediction.of_outlook(self._outlook(examples, risk, matrix, ratios), risk, unfamiliar)

    def predict_proba(self, examples: Sequence[Example], buckets: Buckets) -> Array:
        """Return [examples, classes]: the probability of each bucket."""
        return self.outlook(examples).proba(buckets)

    def predict_bytes(self, examples: Sequence[Example]) -> Array:
        """Return [examples]: the median; infinity for jobs that do not fit."""
        return self.outlook(examples).on_device(0.5)

    def safe_bytes(self, examples: Sequence[Example], risk: float) -> Array:
        """Return [examples]: bounds that a job exceeds with at most this probability; infinity if they do not fit."""
        return self.outlook(examples, risk).on_device(1 - risk)

    @property
    def least_risk(self) -> float:
        """The smallest risk that the number of calibration rows supports."""
        return self.calibration_.least_risk

    def save(self, directory: Path) -> None:
        """Write the scores by stratum, and the jobs that new ones are compared with."""
        names = list(self.calibration_.scores)
        arrays = {f"scores.{index}": self.calibration_.scores[name] for index, name in enumerate(names)}
        settings = {
            "seed": self.seed,
            "strata": names,
            "threshold": self.novelty_.threshold,
            "encoder": self.encoder_.to_json(),
        }
        trees = {f"{_TREES}{name}": value for name, value in self.scale_.arrays().items()}
        write_state(directory, self.kind, State(settings, {"reference": self.novelty_.reference, **arrays, **trees}))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory that `save` wrote; raise a UserError for a damaged or foreign one."""
        state = read_state(directory, cls.kind)
        estimator = cls(state.settings["seed"])
        estimator.calibration_ = CalibratedErrors(
            {name: state.arrays[f"scores.{index}"] for index, name in enumerate(state.settings["strata"])}
        )
        estimator.encoder_ = ExampleEncoder.from_json(state.settings["encoder"])
        estimator.novelty_ = Novelty(state.arrays["reference"], state.settings["threshold"])
        trees = {name: value for name, value in state.arrays.items() if name.startswith(_TREES)}
        estimator.scale_ = ErrorScale.of_arrays({name.removeprefix(_TREES): value for name, value in trees.items()})
        return estimator


def _need_bytes(examples: Sequence[Example]) -> Array:
    """Return [n]: the simulated memory of each job's allocator."""
    return np.array([simulated_need_bytes(example) for example in examples], dtype=np.float64)
