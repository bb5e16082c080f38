"""Fits y = a + b x^p to a cost; the constant a separates fixed cost from growth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

_FLAT = 1.4
"""Costs whose maximum is less than this multiple of their minimum are treated as constant."""
_EXPLAINED = 0.7
"""A fit that leaves a larger share of the scatter around the mean is treated as noise: no growth."""
_EXPONENTS = np.arange(0.05, 2.51, 0.01)
_LEAST_POINTS = 4
"""With fewer points the constant cannot be determined; a line is fitted to the logarithms."""


@dataclass(frozen=True)
class Growth:
    """A fitted law."""

    constant: float
    factor: float
    exponent: float

    def at(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the law."""
        return self.constant + self.factor * np.asarray(x, dtype=float) ** self.exponent


def fit_growth(xs: Sequence[float], ys: Sequence[float]) -> Growth:
    """Return the law with the least squared relative errors."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    if len(x) < _LEAST_POINTS:
        slope, start = np.polyfit(np.log(x), np.log(y), 1)
        return Growth(0.0, float(np.exp(start)), float(slope))
    candidates = [(*_solve(x, y, exponent), exponent) for exponent in _EXPONENTS]
    residual, constant, factor, exponent = min(candidates)
    scatter = float(np.linalg.norm(y / y.mean() - 1))
    if y.max() < _FLAT * y.min() or residual > _EXPLAINED * scatter:
        return Growth(float(y.mean()), 0.0, 0.0)
    return Growth(constant, factor, float(exponent))


def _solve(x: np.ndarray, y: np.ndarray, exponent: float) -> tuple[float, float, float]:
    """Return residual, constant and factor; both coefficients are non-negative."""
    grown = (x / x.max()) ** exponent
    (constant, factor), residual = nnls(np.stack([1 / y, grown / y], axis=1), np.ones_like(y))
    return float(residual), float(constant), float(factor / x.max() ** exponent)
