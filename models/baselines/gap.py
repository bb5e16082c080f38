"""TBEM's regressors (Liu et al., IEEE Access 2022): GV, measured memory as a polynomial of the hyper-parameters, and
Gap, the same for what is measured beyond the static estimate SGV.

TBEM names batch size, depth and the number of convolutions, and leaves the rest to the static analysis of the graph.
The hyper-parameters here are those that it can read from any layer table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vramcast.models.baselines._base import Baseline, figures_of
from vramcast.models.baselines._learned import completed, measured_bytes
from vramcast.models.baselines.polynomial import Polynomial
from vramcast.models.distribution import FigureDistribution, capacities_of
from vramcast.models.example import Example

DEGREES = (1, 2, 3, 4)
ALPHAS = (1e-2, 1e-1, 1.0, 10.0, 100.0)
_QUANTILES = 200
"""Resolution of the distribution of validation errors."""


def _widths(example: Example) -> list[int]:
    """Return the channels (of images) or features of every layer with parameters."""
    shapes = [layer.output_shape for layer in example.layers if layer.parameters and layer.output_shape]
    return [shape[0] if len(shape) == 3 else shape[-1] for shape in shapes] or [0]


def _count(example: Example, *starts: str) -> int:
    return sum(layer.kind.startswith(starts) for layer in example.layers)


HYPERPARAMETERS: Mapping[str, Callable[[Example], float]] = {
    "batch_size": lambda example: example.training.batch_size,
    "depth": lambda example: sum(layer.parameters > 0 for layer in example.layers),
    "convolutions": lambda example: _count(example, "Conv"),
    "norms": lambda example: _count(example, "BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm"),
    "widest": lambda example: max(_widths(example)),
    "mean_width": lambda example: float(np.mean(_widths(example))),
    "input_elements": lambda example: example.input_elements,
    "outputs": lambda example: prod(example.layers[-1].output_shape) if example.layers else 0,
}


def hyperparameters(examples: Sequence[Example]) -> NDArray[np.float64]:
    """Return [examples, hyper-parameters]."""
    rows = [[read(example) for read in HYPERPARAMETERS.values()] for example in examples]
    return np.array(rows, dtype=np.float64).reshape(len(examples), len(HYPERPARAMETERS))


class DirectPolynomial(Baseline):
    """GV: measured memory as a polynomial of the hyper-parameters.

    Jobs that did not fit are left out of the fit. Degree and penalty are those with the smallest mean relative error on
    the validation examples. The ratios of measured to predicted memory there are the distribution around a prediction;
    a job that did not fit counts with the capacity.
    """

    name = "gv"

    def static_bytes(self, example: Example) -> int:
        """Return the part that needs no regression."""
        return 0

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Fit a polynomial of every degree and penalty, and choose the best."""
        fitting, checking = completed(train), completed(validation)
        used_bytes = measured_bytes(fitting)
        self.floor_bytes_ = float(used_bytes.min())
        static_bytes, checked_bytes = self._static_bytes(fitting), measured_bytes(checking)
        best = np.inf
        for polynomial in _candidates(hyperparameters(fitting), used_bytes - static_bytes):
            predicted_bytes = self._predict_with(polynomial, checking)
            error = float(np.mean(np.abs(predicted_bytes - checked_bytes) / checked_bytes))
            if error < best:
                best, self.polynomial_ = error, polynomial
        self.ratios_ = np.quantile(self._ratios(validation), (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
        return self

    def _static_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        return np.array([self.static_bytes(example) for example in examples], dtype=np.float64)

    def _predict_with(self, polynomial: Polynomial, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Predict at least the smallest measured figure, because polynomials extrapolate badly."""
        predicted_bytes = self._static_bytes(examples) + polynomial.predict(hyperparameters(examples))
        return np.maximum(predicted_bytes, self.floor_bytes_)

    def _ratios(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        predicted_bytes = self._predict_with(self.polynomial_, examples)
        used_bytes, limit_bytes = measured_bytes(examples), capacities_of(examples)
        bound_bytes = np.maximum(limit_bytes, predicted_bytes)
        return np.where(np.isfinite(used_bytes), used_bytes, bound_bytes) / predicted_bytes

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> FigureDistribution:
        """Return the polynomial's figure with its errors on the validation examples."""
        predicted_bytes = self._predict_with(self.polynomial_, examples)
        return figures_of(examples, predicted_bytes[:, None] * self.ratios_, predicted_bytes)


class Gap(DirectPolynomial):
    """Gap: what is measured beyond the static estimate, as a polynomial of the hyper-parameters."""

    name = "gap"

    def static_bytes(self, example: Example) -> int:
        """Return the static estimate."""
        return example.static.total_bytes


def _candidates(variables: NDArray[np.float64], values: NDArray[np.float64]) -> Iterator[Polynomial]:
    """Yield the simplest polynomial first, so that ties go to it."""
    for degree, alpha in product(DEGREES, sorted(ALPHAS, reverse=True)):
        yield Polynomial.fit(variables, values, degree, alpha)
