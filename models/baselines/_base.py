"""The base class of baselines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vramcast.models.distribution import FigureDistribution, bounds_of, capacities_of
from vramcast.models.estimators._base import Estimator
from vramcast.models.example import Example


class Baseline(Estimator):
    """An estimator with equally likely figures, which needs no simulation."""

    @property
    def needs_simulation(self) -> bool:
        """True if examples need a simulated measurement."""
        return False


def figures_of(
    examples: Sequence[Example], figures_bytes: NDArray[np.float64], estimate_bytes: NDArray[np.float64]
) -> FigureDistribution:
    """Return the distributions of figures [n, k] with estimates [n]; what reaches a job's capacity does not fit."""
    capacities = capacities_of(examples)
    return FigureDistribution(
        **bounds_of(examples),
        figures_bytes=np.where(figures_bytes >= capacities[:, None], np.inf, figures_bytes),
        estimate_bytes=np.where(estimate_bytes >= capacities, np.inf, estimate_bytes),
    )
