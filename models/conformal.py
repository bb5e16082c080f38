"""Safe bounds: how far above its median a forecast must be read so that it is too low at a chosen risk only.

Split conformal prediction (Vovk et al. 2005), family by family ("Mondrian"): if the calibration jobs and the new one
are exchangeable, the bound holds for any estimator, however wrong its density is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataset_builder.errors import UserError

Array = NDArray[np.float64]

_LEAST_SCALE = 0.002
"""Of a density in logarithms: half a percent between its quartiles."""


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
