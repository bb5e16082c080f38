"""What the baselines that learn share: how examples become targets."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vramcast.errors import UserError
from vramcast.models.example import Example


def measured_bytes(examples: Sequence[Example]) -> NDArray[np.float64]:
    """What each example used; infinity for those that did not fit, since where they died is no need."""
    _check_some(examples)
    labels = [example.measured for example in examples]
    return np.array([label.used_bytes if label.fits else np.inf for label in labels], dtype=np.float64)


def completed(examples: Sequence[Example]) -> list[Example]:
    """Those that fitted: their figure is what the job needed."""
    found = [example for example in examples if example.measured.fits]
    _check_some(found)
    return found


def capacity_bytes(examples: Sequence[Example]) -> NDArray[np.float64]:
    """The card of each example."""
    return np.array([example.capacity_bytes for example in examples], dtype=np.float64)


def _check_some(examples: Sequence[Example]) -> None:
    if not examples:
        raise UserError("expected measured examples that fit to learn from, found none: name a table with more rows")
