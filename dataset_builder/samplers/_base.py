"""The interface of every sampler."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from vramcast.dataset_builder.space import Assignment, Space


class Sampler(ABC):
    """Proposes configurations.

    The stream depends only on the space and the seed, never on how many configurations are taken, so a build can be
    resumed and extended.
    """

    @abstractmethod
    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Yield assignments in order; the stream may be unbounded, repeat itself, or contain impossible ones."""

    @abstractmethod
    def describe(self, space: Space) -> str:
        """Describe in a few words where the configurations of this space come from."""

    def details(self, space: Space) -> str:
        """Describe the same at length, for the coverage report."""
        return self.describe(space)
