"""GB buckets: classes of equal width up to the card, and a last one for what does not fit."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Buckets:
    """Class k holds [k * width, (k + 1) * width); the last class is "does not fit"."""

    width_bytes: int
    capacity_bytes: int

    @property
    def fitting(self) -> int:
        """How many classes there are for jobs that fit."""
        return -(-self.capacity_bytes // self.width_bytes)

    @property
    def classes(self) -> int:
        """With the one for jobs that do not fit."""
        return self.fitting + 1

    @property
    def edges_bytes(self) -> NDArray[np.float64]:
        """The bounds of the classes that fit: [fitting + 1]."""
        return np.minimum(np.arange(self.fitting + 1) * self.width_bytes, self.capacity_bytes).astype(np.float64)

    def of(self, used_bytes: ArrayLike) -> NDArray[np.int64]:
        """The class of each figure; infinity does not fit."""
        used = np.asarray(used_bytes, dtype=np.float64)
        classes = np.floor_divide(np.minimum(used, self.capacity_bytes), self.width_bytes)
        return np.where(used >= self.capacity_bytes, self.fitting, np.minimum(classes, self.fitting - 1)).astype(
            np.int64
        )
