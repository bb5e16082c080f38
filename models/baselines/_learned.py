"""Labels of examples as arrays, for baselines that learn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vramcast.errors import UserError
from vramcast.models.example import Example


def measured_bytes(examples: Sequence[Example]) -> NDArray[np.float64]:
    """Return the measured memory of each example; infinity for jobs that did not fit, whose need is unknown."""
    _check_some(examples)
    labels = [example.measured for example in examples]
    return np.array([label.used_bytes if label.fits else np.inf for label in labels], dtype=np.float64)


def completed(examples: Sequence[Example]) -> list[Example]:
    """Return the examples that fit, whose label is their need."""
    fitting = [example for example in examples if example.measured.fits]
    _check_some(fitting)
    return fitting


def _check_some(examples: Sequence[Example]) -> None:
    if not examples:
        raise UserError("expected measured examples that fit to learn from, found none: name a table with more rows")
