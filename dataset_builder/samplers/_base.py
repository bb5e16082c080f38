"""What every sampler owes the pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from vramcast.dataset_builder.space import Assignment, Space


class Sampler(ABC):
    """Proposes configurations.

    The stream depends on the space and the seed alone, never on how many are taken: that is what lets a build be
    resumed, and extended.
    """

    @abstractmethod
    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Assignments in order, without end or until the sampler has no more. Some may repeat or be impossible."""

    def describe(self, space: Space) -> str:
        """One line on what the sampler will do in this space."""
        return f"{type(self).__name__} over {len(space.factors)} factors"
