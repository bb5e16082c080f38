"""Calibration: the errors of estimates on measured jobs, by stratum, as the outlook of new jobs.

Split conformal prediction (Vovk et al. 2005), stratum by stratum ("Mondrian"): if the calibration jobs of a stratum and
a new job are exchangeable, the job exceeds the bound at a risk with at most this probability, however wrong the
estimates are. Errors are scored in units of what is uncertain in each job (`uncertainty.py`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.errors import UserError
from vramcast.models.disturbances import disturbed
from vramcast.models.example import UNBOUNDED_BYTES, Example
from vramcast.models.outlook import ScoredOutlook, capacities_of, overheads_of, own_bytes_of, score_quantile
from vramcast.models.uncertainty import calibrated_strata, strata, unit_bytes
from vramcast.virtual_gpu.allocator.sizes import MIB

Array = NDArray[np.float64]

LEAST_ROWS = 99
"""The smallest stratum that bounds a job by itself: a risk of 1 % needs as many rows. A job of a smaller stratum is
bounded by the next wider one."""


_SMALL_SHARE = 0.25
"""A median below this share of the largest errors is noise."""


@dataclass(frozen=True)
class CalibratedErrors:
    """Sorted scores of calibration jobs by stratum."""

    scores: Mapping[str, Array]

    @classmethod
    def fit(cls, examples: Sequence[Example], own_bytes: Array, scales: Array) -> Self:
        """Score the estimates of measured jobs; a job that did not fit has the score of the capacity.

        A row that another process disturbed counts in the strata of its own stack alone. `scales` [n] are the usual
        errors of such jobs, relative to their estimates.
        """
        if not examples:
            raise UserError("expected calibration examples, found none: hold some out of training")
        errors = own_bytes_of(examples, own_bytes) - own_bytes
        odd = disturbed(examples, own_bytes)
        by_stratum: dict[str, list[float]] = defaultdict(list)
        for example, error, noisy, scale in zip(examples, errors.tolist(), odd.tolist(), scales.tolist(), strict=True):
            for name in calibrated_strata(example, noisy):
                by_stratum[name].append(error / unit_bytes(example, name, scale))
        return cls({name: pinned(np.sort(np.array(values))) for name, values in sorted(by_stratum.items())})

    def outlook(
        self, examples: Sequence[Example], own_bytes: Array, risk: float, scales: Array, widening: Array | None = None
    ) -> ScoredOutlook:
        """Return the outlook of jobs with these estimates of their allocators' memory.

        All figures of one answer, the bound at `risk` among them, come from one stratum. `widening` [n] multiplies the
        units of jobs that are unlike the calibration jobs.
        """
        if not 0 < risk < 1:
            raise UserError(f"expected a risk between 0 and 1, found {risk!r}: change it")
        chosen = [self.stratum_of(example, risk) for example in examples]
        jobs = zip(examples, chosen, scales.tolist(), strict=True)
        units = np.array([unit_bytes(*job) for job in jobs], dtype=np.float64)
        units = units if widening is None else units * widening
        overheads = overheads_of(examples)
        return ScoredOutlook(
            estimate_bytes=overheads + own_bytes,
            unit_bytes=units,
            scores=[
                _over_orders(self.scores[name], example, own, unit)
                for name, example, own, unit in zip(chosen, examples, own_bytes.tolist(), units.tolist(), strict=True)
            ],
            floor_bytes=overheads,
            capacity_bytes=capacities_of(examples),
        )

    def stratum_of(self, example: Example, risk: float) -> str:
        """Return the narrowest stratum of a job with enough rows for a risk, else its one with the most rows."""
        needed = max(LEAST_ROWS, math.ceil(1 / risk - 1e-9) - 1)
        names = [name for name in strata(example) if name in self.scores]
        for name in names:
            if len(self.scores[name]) >= needed:
                return name
        return max(names or self.scores, key=lambda name: len(self.scores[name]))

    @property
    def least_risk(self) -> float:
        """The smallest risk that the largest stratum supports."""
        return 1 / (max(map(len, self.scores.values())) + 1)


def _over_orders(scores: Array, example: Example, own_bytes: float, unit_bytes: float) -> Array:
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


def pinned(scores: Array) -> Array:
    """Return sorted scores in which those between zero and the median are zero, so that the estimate is the median.

    A median error that is small beside the largest ones corrects no job, and moves some across the edge of a bucket. No
    positive score above the median changes, so bounds stay the same. A larger median, an error of most jobs, stays.
    """
    middle = score_quantile(scores, 0.5)
    if abs(middle) > _SMALL_SHARE * np.quantile(np.abs(scores), 0.99):
        return scores
    between = (scores >= min(middle, 0.0)) & (scores <= max(middle, 0.0))
    return np.where(between, 0.0, scores)
