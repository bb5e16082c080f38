"""The exponent of a cost: y = a + b x^p, with what is there from the start told apart from what grows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

_FLAT = 1.4
"""Between the largest and the smallest figure: below it there is noise, and no growth."""
_EXPLAINED = 0.7
"""A law that leaves more of the scatter around the mean than this is read into noise: nothing grows."""
_EXPONENTS = np.arange(0.05, 2.51, 0.01)
_LEAST_POINTS = 4
"""With fewer there is nothing to tell a constant from: a straight line through the logarithms."""


@dataclass(frozen=True)
class Growth:
    """A fitted law."""

    constant: float
    factor: float
    exponent: float

    def at(self, x: np.ndarray) -> np.ndarray:
        """What the law says."""
        return self.constant + self.factor * np.asarray(x, dtype=float) ** self.exponent


def fit_growth(xs: Sequence[float], ys: Sequence[float]) -> Growth:
    """The law with the least squares of relative errors."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    if len(x) < _LEAST_POINTS:
        slope, start = np.polyfit(np.log(x), np.log(y), 1)
        return Growth(0.0, float(np.exp(start)), float(slope))
    found = [(*_solve(x, y, exponent), exponent) for exponent in _EXPONENTS]
    residual, constant, factor, exponent = min(found)
    scatter = float(np.linalg.norm(y / y.mean() - 1))
    if y.max() < _FLAT * y.min() or residual > _EXPLAINED * scatter:
        return Growth(float(y.mean()), 0.0, 0.0)
    return Growth(constant, factor, float(exponent))


def _solve(x: np.ndarray, y: np.ndarray, exponent: float) -> tuple[float, float, float]:
    """Residual, constant and factor; neither is negative."""
    grown = (x / x.max()) ** exponent
    (constant, factor), residual = nnls(np.stack([1 / y, grown / y], axis=1), np.ones_like(y))
    return float(residual), float(constant), float(factor / x.max() ** exponent)
