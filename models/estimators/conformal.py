"""Safe margins: how much memory to reserve above an estimate so that it is too low with a chosen probability only.

Split conformal prediction (Vovk et al. 2005), stratum by stratum ("Mondrian"): if the calibration jobs and the new job
are exchangeable, the bound holds for any estimator, even if its density is wrong.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vramcast.errors import UserError
from vramcast.models.outlook import score_quantile
from vramcast.virtual_gpu.allocator.sizes import MIB

Array = NDArray[np.float64]

_STEADY_BYTES = 512 * MIB
"""Errors that do not grow with a job, such as one more segment or another workspace.

A purely relative margin would be set by small jobs, for which 100 MiB is much, and be too wide for large ones.
"""

_SEGMENT_BYTES = 20 * MIB
"""Size of a segment that the allocator takes from the device."""
_LEAST_SCALE = 0.002
"""Smallest scale of a density of scores: half a percent between its quartiles."""


def score(own_bytes: ArrayLike, estimated_bytes: ArrayLike) -> Array:
    """Return [n]: the score, which is the log ratio of need to estimate with the constant part added to both."""
    return np.asarray(np.log(_steady(own_bytes)) - np.log(_steady(estimated_bytes)))


def raised(estimated_bytes: ArrayLike, margins: ArrayLike) -> Array:
    """Return [n]: the memory with these scores, the inverse of `score`."""
    return _steady(estimated_bytes) * np.exp(margins) - _STEADY_BYTES


def relative(scales: ArrayLike, estimated_bytes: ArrayLike) -> Array:
    """Convert [n] widths of scores to widths of the logarithm of memory, which are greater for small jobs.

    Estimates are clamped to one segment, because the logarithm diverges below it.
    """
    estimated = np.maximum(estimated_bytes, _SEGMENT_BYTES)
    return np.asarray(np.log(raised(estimated, scales) / estimated))


def _steady(own_bytes: ArrayLike) -> Array:
    return np.asarray(own_bytes, dtype=np.float64) + _STEADY_BYTES


@dataclass(frozen=True)
class SafeMargins:
    """Sorted scores of calibration jobs by stratum."""

    scores: Mapping[str, Array]

    @classmethod
    def fit(cls, families: Sequence[str], scores: ArrayLike) -> Self:
        """Sort the scores of the calibration jobs; a job that did not fit has the score of the capacity."""
        if not families:
            raise UserError("expected calibration examples, found none: hold some out of training")
        names, values = np.asarray(families), np.asarray(scores, dtype=np.float64)
        return cls({str(name): np.sort(values[names == name]) for name in np.unique(names)})

    def margins(self, families: Sequence[str], risk: float) -> Array:
        """Return [n]: scores that a job of each stratum exceeds with at most this probability; at least 0."""
        margin_of = {family: score_quantile(self.chosen(family, risk), 1 - risk) for family in set(families)}
        return np.array([max(margin_of[family], 0.0) for family in families])

    def scales(self, families: Sequence[str]) -> Array:
        """Return [n]: the scale of a logistic with the quartiles of each stratum's scores, or of all scores."""
        scale_of = {family: _scale(self.scores.get(family, self._pooled)) for family in set(families)}
        return np.array([scale_of[family] for family in families])

    @property
    def least_risk(self) -> float:
        """The smallest risk that the number of rows supports."""
        return 1 / (len(self._pooled) + 1)

    @property
    def _pooled(self) -> Array:
        return np.sort(np.concatenate(list(self.scores.values())))

    def chosen(self, family: str, risk: float) -> Array:
        """Return the scores of the stratum if it has enough rows for the risk, else those of all rows."""
        if not 0 < risk < 1:
            raise UserError(f"expected a risk between 0 and 1, found {risk!r}: change it")
        for scores in (self.scores.get(family, np.empty(0)), self._pooled):
            if math.ceil((len(scores) + 1) * (1 - risk)) <= len(scores):
                return scores
        needed = math.ceil(1 / risk) - 1
        raise UserError(
            f"expected {needed} calibration rows or more for a risk of {risk:g}, found {len(self._pooled)}: "
            "raise the risk, or calibrate on more rows"
        )


def _scale(scores: Array) -> float:
    """Return the scale; the quartiles of a standard logistic are log 3 from its middle."""
    low, high = np.quantile(scores, [0.25, 0.75])
    return max(float(high - low) / (2 * math.log(3)), _LEAST_SCALE)
