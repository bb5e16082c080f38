"""Ridge regression on a polynomial of several variables."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Polynomial:
    """A fitted polynomial over standardised variables."""

    means: Matrix
    scales: Matrix
    powers: NDArray[np.int8]
    """[terms, variables]: the exponents of each term."""
    coefficients: Matrix
    intercept: float

    @property
    def degree(self) -> int:
        """The largest sum of exponents in a term."""
        return int(self.powers.sum(axis=1).max())

    @classmethod
    def fit(cls, variables: Matrix, values: Matrix, degree: int, alpha: float) -> Self:
        """Fit least squares with a penalty on standardised terms."""
        variable_scaler, terms, term_scaler = StandardScaler(), PolynomialFeatures(degree), StandardScaler()
        terms.set_params(include_bias=False)
        ridge = Ridge(alpha=alpha)
        make_pipeline(variable_scaler, terms, term_scaler, ridge).fit(variables, values)
        coefficients = ridge.coef_ / term_scaler.scale_
        return cls(
            means=variable_scaler.mean_,
            scales=variable_scaler.scale_,
            powers=terms.powers_.astype(np.int8),
            coefficients=coefficients,
            intercept=float(ridge.intercept_ - coefficients @ term_scaler.mean_),
        )

    def predict(self, variables: Matrix) -> Matrix:
        """Return [rows]: the polynomial's value for each row of variables."""
        standard = (variables - self.means) / self.scales
        # column by column: a product over [rows, terms, variables] would need too much memory
        terms = np.ones((len(standard), len(self.powers)))
        for column, exponents in zip(standard.T, self.powers.T, strict=True):
            terms *= column[:, None] ** exponents
        return terms @ self.coefficients + self.intercept
