"""Safe bounds: how far above an estimate memory must be set aside so that it is too low at a chosen risk only.

Split conformal prediction (Vovk et al. 2005), family by family ("Mondrian"): if the calibration jobs and the new one
are exchangeable, the bound holds for any estimator, however wrong its density is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vramcast.errors import UserError
from vramcast.virtual_gpu.sizes import MIB

Array = NDArray[np.float64]

_STEADY_BYTES = 512 * MIB
"""What a job may be off by whatever its size, such as a segment more or another workspace, beside what grows with it.

A margin in proportion alone would be set by small jobs, for which 100 MiB is much, and be too wide for large ones.
"""

_SEGMENT_BYTES = 20 * MIB
"""What the allocator takes from the card at a time."""
_LEAST_SCALE = 0.002
"""Of a density of scores: half a percent between its quartiles."""


def score(own_bytes: ArrayLike, estimated_bytes: ArrayLike) -> Array:
    """[n]: how far what jobs needed lies above what was estimated; minus infinity where nothing would be enough."""
    return np.asarray(np.log(_steady(own_bytes)) - np.log(_steady(estimated_bytes)))


def raised(estimated_bytes: ArrayLike, margins: ArrayLike) -> Array:
    """[n]: what has these scores."""
    return _steady(estimated_bytes) * np.exp(margins) - _STEADY_BYTES


def relative(scales: ArrayLike, estimated_bytes: ArrayLike) -> Array:
    """[n]: widths of scores as widths of the logarithm of memory, which are greater for small jobs.

    But not for those below a segment, of which the logarithm would know no bound.
    """
    estimated = np.maximum(estimated_bytes, _SEGMENT_BYTES)
    return np.asarray(np.log(raised(estimated, scales) / estimated))


def _steady(own_bytes: ArrayLike) -> Array:
    return np.asarray(own_bytes, dtype=np.float64) + _STEADY_BYTES


@dataclass(frozen=True)
class SafeMargins:
    """Sorted scores of jobs that were not trained on, by family."""

    scores: Mapping[str, Array]

    @classmethod
    def fit(cls, families: Sequence[str], scores: ArrayLike) -> Self:
        """Keep the scores of the calibration jobs; of one that did not fit, the score of the card's limit."""
        if not families:
            raise UserError("expected calibration examples, found none: hold some out of training")
        names, values = np.asarray(families), np.asarray(scores, dtype=np.float64)
        return cls({str(name): np.sort(values[names == name]) for name in np.unique(names)})

    def margins(self, families: Sequence[str], risk: float) -> Array:
        """[n]: scores that a job of each family exceeds with at most that probability; never below the median."""
        if not 0 < risk < 1:
            raise UserError(f"expected a risk between 0 and 1, found {risk!r}: change it")
        found = {family: self._margin(family, risk) for family in set(families)}
        return np.array([max(found[family], 0.0) for family in families])

    def scales(self, families: Sequence[str]) -> Array:
        """[n]: of a logistic with the quartiles of each family's scores, or of all where it has none."""
        found = {family: _scale(self.scores.get(family, self._pooled)) for family in set(families)}
        return np.array([found[family] for family in families])

    @property
    def least_risk(self) -> float:
        """The smallest risk that so many rows can speak of."""
        return 1 / (len(self._pooled) + 1)

    @property
    def _pooled(self) -> Array:
        return np.sort(np.concatenate(list(self.scores.values())))

    def _margin(self, family: str, risk: float) -> float:
        """Of the family itself where it has enough rows for the risk, else of all rows."""
        for scores in (self.scores.get(family, np.empty(0)), self._pooled):
            rank = math.ceil((len(scores) + 1) * (1 - risk))
            if rank <= len(scores):
                return float(scores[rank - 1])
        needed = math.ceil(1 / risk) - 1
        raise UserError(
            f"expected {needed} calibration rows or more for a risk of {risk:g}, found {len(self._pooled)}: "
            "raise the risk, or calibrate on more rows"
        )


def _scale(scores: Array) -> float:
    """Quartiles of a standard logistic are log 3 from its middle."""
    low, high = np.quantile(scores, [0.25, 0.75])
    return max(float(high - low) / (2 * math.log(3)), _LEAST_SCALE)
