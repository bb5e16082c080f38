"""Formulas: baselines that compute one figure and learn nothing."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._base import Baseline, figures_of
from vramcast.models.distribution import FigureDistribution
from vramcast.models.example import Example


class Formula(Baseline):
    """An estimator that computes one figure from an example."""

    @abstractmethod
    def used_bytes(self, example: Example) -> float:
        """Return the figure, regardless of the capacity."""

    def figures_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return [examples]: the figures, regardless of the capacity."""
        return np.array([self.used_bytes(example) for example in examples], dtype=np.float64)

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Return the formula, which has nothing to learn."""
        return self

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> FigureDistribution:
        """Return the figure of each example with probability 1."""
        figures = self.figures_bytes(examples)
        return figures_of(examples, figures[:, None], figures)
