"""The outlook of an ensemble: its forecast below the median, and above it the errors of calibration jobs.

A network's tails are not to be trusted at a risk of 1 %, so the upper half of the distribution is conformal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramcast.models.estimators.conformal import raised, score
from vramcast.models.estimators.forecast import Forecast
from vramcast.models.outlook import Outlook, score_quantile, share_below

Array = NDArray[np.float64]


@dataclass(frozen=True)
class BoundedForecast(Outlook):
    """Forecasts of n jobs with the sorted scores of the calibration jobs of each one's stratum."""

    forecast: Forecast
    scores: Sequence[Array]
    median_bytes: Array
    """[n]: of the job's allocator; infinity for jobs that fit no device."""

    @classmethod
    def of(cls, forecast: Forecast, scores: Sequence[Array]) -> "BoundedForecast":
        """Return the outlook of forecasts."""
        return cls(forecast, scores, forecast.own_quantile_bytes(0.5))

    @property
    def capacity_bytes(self) -> Array:  # type: ignore[override]
        """[n]"""
        return self.forecast.capacity_bytes.numpy()

    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the forecast's probability up to the median, and at least one half above it."""
        shares = np.zeros((len(jobs), len(used_bytes)))
        for row, job in enumerate(jobs):
            own = np.maximum(used_bytes - float(self.forecast.overhead_bytes[job]), 0)
            median, scores = self.median_bytes[job], self.scores[job]
            lower = np.minimum(self.forecast.one(job).below(used_bytes)[0], 0.5)
            upper = share_below(score(own, median), scores)
            shares[row] = np.where(own <= median, lower, np.maximum(upper, 0.5))
        return shares

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the forecast's quantile, or above the median the one of the scores."""
        overhead = self.forecast.overhead_bytes.numpy()
        if level <= 0.5:
            return overhead + self.forecast.own_quantile_bytes(level)
        margins = np.array([max(score_quantile(item, level), 0.0) for item in self.scores])
        return np.asarray(overhead + raised(self.median_bytes, margins))
