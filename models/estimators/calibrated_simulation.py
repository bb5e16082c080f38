"""An estimator without a network: the simulation, with the errors that it showed on measured jobs.

Networks that learn the gap between simulation and measurement were tried: on networks of unseen designs their errors
are as large as those of the simulation.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vramcast.defaults import RISK
from vramcast.models.calibration import CalibratedErrors, pinned, with_tail
from vramcast.models.distribution import ErrorDistribution, bounds_of, own_bytes_of
from vramcast.models.disturbances import disturbed
from vramcast.models.error_scale import fit_scale, scales_of, scales_of_other_folds
from vramcast.models.estimators._base import SavedEstimator
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.models.example import UNBOUNDED_BYTES, Example
from vramcast.models.features.full import simulated_need_bytes
from vramcast.models.out_of_distribution import OutOfDistribution, flags_of
from vramcast.models.storage import State
from vramcast.models.trees import Trees
from vramcast.models.uncertainty import calibrated_strata, has_learned_scale, strata, unit_bytes
from vramcast.virtual_gpu.allocator.sizes import MIB

Array = NDArray[np.float64]

_FEATURES = "full"
_TREES = "error scale."
_WIDENING = 0.5
"""Growth of the width with the logarithm of the distance to the calibration jobs."""


class CalibratedSimulation(SavedEstimator):
    """The simulated memory, with a distribution of errors that depends on what is uncertain in a job."""

    kind: ClassVar[str] = "calibrated simulation"
    name = "simulation"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    errors_: CalibratedErrors
    encoder_: ExampleEncoder
    out_of_distribution_: OutOfDistribution
    trees_: Trees
    """They predict the usual errors of generated networks."""

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Score the simulations of all examples, in units of the errors that jobs of other designs lead to expect."""
        examples = [*train, *validation]
        need = _need_bytes(examples)
        self.encoder_ = ExampleEncoder.fit(examples, _FEATURES)
        matrix = self.encoder_.matrix(examples)
        self.out_of_distribution_ = self._out_of_distribution(examples, matrix)
        self.trees_, scales = self._error_scale(examples, matrix, need)
        self.errors_ = calibrated_errors(examples, need, scales)
        return self

    def _error_scale(self, examples: Sequence[Example], matrix: Array, need_bytes: Array) -> tuple[Trees, Array]:
        """Return the learned scale of errors, and [n] what it gives for examples that it has not seen."""
        chosen = np.array([has_learned_scale(item) for item in examples])
        if not chosen.any():
            chosen[:] = True
        rows = matrix[chosen]
        errors = (own_bytes_of(examples, need_bytes) / np.maximum(need_bytes, 1) - 1)[chosen]
        designs = [item.design for item, use in zip(examples, chosen, strict=True) if use]
        scales = np.zeros(len(examples))
        scales[chosen] = scales_of_other_folds(rows, errors, designs, self.seed)
        return fit_scale(rows, errors, self.seed), scales

    def _out_of_distribution(self, examples: Sequence[Example], matrix: Array) -> OutOfDistribution:
        """Learn the distance from which a job is out of distribution, between jobs of different designs."""
        from vramcast.dataset_builder.store.splits import make_split  # noqa: PLC0415 - answers need no splits

        split = make_split([item.design for item in examples], {"apart": 0.3, "reference": 0.7}, self.seed)
        apart = np.array([split.part_of(item.design) == "apart" for item in examples])
        return OutOfDistribution.fit(matrix[~apart], matrix[apart], self.seed)

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> ErrorDistribution:
        """Return the simulated memory with the errors of measured jobs.

        Without a risk, strata are chosen for the usual one. Jobs out of distribution are widened by their distance.
        """
        if risk is not None:
            self.errors_.check_risk(risk)
        matrix = self.encoder_.matrix(examples)
        ratios = self.out_of_distribution_.ratios(matrix)
        widening = 1 + _WIDENING * np.log(np.maximum(ratios, 1))
        names = [self.errors_.stratum_of(strata(example), RISK if risk is None else risk) for example in examples]
        jobs = zip(examples, names, scales_of(self.trees_, matrix).tolist(), strict=True)
        units = np.array([unit_bytes(*job) for job in jobs], dtype=np.float64) * widening
        need = _need_bytes(examples)
        bounds = bounds_of(examples, flags_of(ratios, examples))
        return ErrorDistribution(
            **bounds,
            estimate_bytes=bounds["overhead_bytes"] + need,
            unit_bytes=units,
            scores=[
                with_tail(over_orders(self.errors_.scores[name], example, own, unit))
                for name, example, own, unit in zip(names, examples, need.tolist(), units.tolist(), strict=True)
            ],
        )

    @property
    def least_risk(self) -> float:
        """The smallest risk that the number of calibration rows supports."""
        return self.errors_.least_risk

    def state(self) -> State:
        """Return the scores by stratum, and the jobs that new ones are compared with."""
        names = list(self.errors_.scores)
        arrays = {f"scores.{index}": self.errors_.scores[name] for index, name in enumerate(names)}
        settings = {
            "seed": self.seed,
            "strata": names,
            "threshold": self.out_of_distribution_.threshold,
            "encoder": self.encoder_.to_json(),
        }
        trees = {f"{_TREES}{name}": value for name, value in self.trees_.arrays().items()}
        return State(settings, {"reference": self.out_of_distribution_.reference, **arrays, **trees})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore an estimator from its state."""
        estimator = cls(state.settings["seed"])
        estimator.errors_ = CalibratedErrors(
            {name: state.arrays[f"scores.{index}"] for index, name in enumerate(state.settings["strata"])}
        )
        estimator.encoder_ = ExampleEncoder.from_json(state.settings["encoder"])
        estimator.out_of_distribution_ = OutOfDistribution(state.arrays["reference"], state.settings["threshold"])
        trees = {name: value for name, value in state.arrays.items() if name.startswith(_TREES)}
        estimator.trees_ = Trees.of_arrays({name.removeprefix(_TREES): value for name, value in trees.items()})
        return estimator


def calibrated_errors(examples: Sequence[Example], need_bytes: Array, scales: Array) -> CalibratedErrors:
    """Return the errors of simulations of measured jobs; a job that did not fit has the error of the capacity.

    A row that another process disturbed counts in the strata of its own stack alone. `scales` [n] are the usual errors
    of such jobs, relative to their estimates.
    """
    errors = CalibratedErrors.fit(_scored(examples, need_bytes, scales))
    return CalibratedErrors({name: pinned(scores) for name, scores in errors.scores.items()})


def _scored(examples: Sequence[Example], need_bytes: Array, scales: Array) -> Iterator[tuple[str, float]]:
    errors = own_bytes_of(examples, need_bytes) - need_bytes
    noisy = disturbed(examples, need_bytes)
    for example, error, odd, scale in zip(examples, errors.tolist(), noisy.tolist(), scales.tolist(), strict=True):
        for name in calibrated_strata(example, odd):
            yield name, error / unit_bytes(example, name, scale)


def over_orders(scores: Array, example: Example, own_bytes: float, unit_bytes: float) -> Array:
    """Return the scores of a job whose batches vary in length: the error of any row, around any order of batches.

    A run whose cache does not fit runs all the same, since the allocator frees its cache before it runs out of memory:
    it fills the device, if the longest batch alone fits.
    """
    if example.orders is None:
        return scores
    room_bytes = example.capacity_bytes - example.overhead_bytes
    peaks = example.orders.reserved_bytes
    beyond_bytes = 2 * (room_bytes if example.capacity_bytes < UNBOUNDED_BYTES else example.orders.longest_bytes)
    errors = unit_bytes * scores[None]
    runs_out = np.array([item is None for item in peaks])[:, None]
    orders = np.array([beyond_bytes if item is None else item for item in peaks])[:, None]
    most = np.where(runs_out, np.inf, np.maximum(example.orders.longest_bytes + errors, room_bytes - MIB))
    return np.sort(((np.minimum(orders + errors, most) - own_bytes) / unit_bytes).ravel())


def _need_bytes(examples: Sequence[Example]) -> Array:
    """Return [n]: the simulated memory of each job's allocator."""
    return np.array([simulated_need_bytes(example) for example in examples], dtype=np.float64)
