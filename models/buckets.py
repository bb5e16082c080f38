"""Buckets: classes of equal width up to the capacity, and a last one for jobs that do not fit."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SLIVER = 0.1
"""Share of a width: a smaller rest of the capacity above the last whole bucket is no class of its own."""
_NEARLY = 0.7
"""Share of the largest probability from which a class counts as nearly as likely."""


@dataclass(frozen=True)
class Buckets:
    """Class k holds [k * width, (k + 1) * width); the last class is "does not fit".

    The last class begins at the capacity, or at the end of the last whole bucket if only a sliver is left above, like
    GPUMemNet's classes of 8000 MiB on a device of 40 GB, whose sixth begins at 40,000 MiB.
    """

    width_bytes: int
    capacity_bytes: int

    @property
    def fitting(self) -> int:
        """The number of classes for jobs that fit."""
        whole, rest = divmod(self.capacity_bytes, self.width_bytes)
        return whole if whole and rest < _SLIVER * self.width_bytes else whole + 1

    @property
    def classes(self) -> int:
        """The number of classes, with the one for jobs that do not fit."""
        return self.fitting + 1

    @property
    def edges_bytes(self) -> NDArray[np.float64]:
        """The bounds of the classes that fit: [fitting + 1]."""
        return np.minimum(np.arange(self.fitting + 1) * self.width_bytes, self.capacity_bytes).astype(np.float64)

    def of(self, used_bytes: ArrayLike) -> NDArray[np.int64]:
        """Return the class of each figure; infinity does not fit."""
        used = np.asarray(used_bytes, dtype=np.float64)
        classes = np.floor_divide(np.minimum(used, self.capacity_bytes), self.width_bytes)
        return np.where(used >= self.capacity_bytes, self.fitting, np.minimum(classes, self.fitting)).astype(np.int64)


def choose_bucket(proba: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return [n]: the likeliest class of probabilities [n, classes], or the highest that is nearly as likely.

    Of two likely buckets, the lower one costs a crash if it is wrong, the higher one some memory.
    """
    nearly = proba >= _NEARLY * proba.max(axis=1, keepdims=True)
    last: NDArray[np.int64] = proba.shape[1] - 1 - nearly[:, ::-1].argmax(axis=1)
    return last
