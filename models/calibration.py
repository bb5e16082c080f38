"""Calibration: the errors of estimates on measured jobs, by stratum, bound the memory of new jobs.

Split conformal prediction (Vovk et al. 2005), stratum by stratum ("Mondrian"): if the calibration jobs of a stratum and
a new job are exchangeable, the job exceeds the bound at a risk with at most this probability, however wrong the
estimates are. Strata and units are those of the estimator (`uncertainty`, `estimators/network_uncertainty`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.errors import UserError
from vramcast.models.distribution import score_quantile

Array = NDArray[np.float64]

EVERYTHING = "all"
"""The widest stratum, which bounds jobs of small strata."""
LEAST_ROWS = 99
"""The smallest stratum that bounds a job by itself: a risk of 1 % needs as many rows. A job of a smaller stratum is
bounded by the next wider one."""
_SMALL_SHARE = 0.25
"""A median below this share of the largest errors is noise."""


@dataclass(frozen=True)
class CalibratedErrors:
    """Sorted scores of calibration jobs by stratum: errors of estimates, in the units of an estimator.

    >>> errors = CalibratedErrors.fit([("cnn", 0.001 * rank) for rank in range(999)] + [("rnn", 3.0)])
    >>> errors.stratum_of(["cnn"], risk=0.01), errors.stratum_of(["rnn", "cnn"], risk=0.01)  # one row bounds nothing
    ('cnn', 'cnn')
    >>> float(score_quantile(with_tail(errors.scores["cnn"]), 0.99))  # 1 of 100 jobs exceeds its estimate by more
    0.989
    >>> errors.least_risk
    0.001

    Known limits: bounds hold for jobs like those of the stratum, on average over jobs, not for each job. Rows say
    nothing about errors that are rarer than one in their number; these count as twice the largest error.
    """

    scores: Mapping[str, Array]

    @classmethod
    def fit(cls, scored: Iterable[tuple[str, float]]) -> Self:
        """Sort the scores of calibration jobs, each given with its stratum; a job may count in several strata."""
        by_stratum: dict[str, list[float]] = defaultdict(list)
        for stratum, score in scored:
            by_stratum[stratum].append(score)
        if not by_stratum:
            raise UserError("expected calibration examples, found none: hold some out of training")
        return cls({name: np.sort(np.array(values, dtype=np.float64)) for name, values in sorted(by_stratum.items())})

    def stratum_of(self, strata: Sequence[str], risk: float) -> str:
        """Return the first stratum of a job, the narrowest first, with enough rows for a risk, else its largest."""
        needed = max(LEAST_ROWS, _rows_for(risk))
        names = [name for name in strata if name in self.scores]
        for name in names:
            if len(self.scores[name]) >= needed:
                return name
        return max(names or self.scores, key=lambda name: len(self.scores[name]))

    def check_risk(self, risk: float) -> None:
        """Raise a UserError for a risk that the number of rows does not support."""
        if not 0 < risk < 1:
            raise UserError(f"expected a risk between 0 and 1, found {risk!r}: change it")
        if risk < self.least_risk:
            raise UserError(
                f"expected {_rows_for(risk)} calibration rows or more for a risk of {risk:g}, found {self._most}: "
                "raise the risk, or calibrate on more rows"
            )

    @property
    def least_risk(self) -> float:
        """The smallest risk that the largest stratum supports."""
        return 1 / (self._most + 1)

    @property
    def _most(self) -> int:
        return max(map(len, self.scores.values()))


def _rows_for(risk: float) -> int:
    return math.ceil(1 / risk - 1e-9) - 1


def with_tail(scores: Array) -> Array:
    """Append the score of a job that is rarer than the rows: twice the largest one."""
    return np.append(scores, max(2 * scores[-1], scores[-1]))


def pinned(scores: Array) -> Array:
    """Return sorted scores in which those between zero and the median are zero, so that the estimate is the median.

    A median error that is small beside the largest ones corrects no job, and moves some across the edge of a bucket. No
    positive score above the median changes, so bounds stay the same. A larger median, an error of most jobs, stays.
    """
    middle = score_quantile(with_tail(scores), 0.5)
    if abs(middle) > _SMALL_SHARE * np.quantile(np.abs(scores), 0.99):
        return scores
    between = (scores >= min(middle, 0.0)) & (scores <= max(middle, 0.0))
    return np.where(between, 0.0, scores)
