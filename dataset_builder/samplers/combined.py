"""Sampling by an orthogonal array first and uniform draws after."""

from collections.abc import Iterator
from itertools import chain

from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.samplers.uniform import UniformSampler
from vramcast.dataset_builder.space import Assignment, Space


class CombinedSampler(Sampler):
    """Yields all candidates of one sampler, then uniform draws."""

    def __init__(self, first: Sampler) -> None:
        self.first = first
        self.fill = UniformSampler()

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Yield the candidates of the first sampler, then an unbounded stream of uniform draws."""
        return chain(self.first.candidates(space, seed), self.fill.candidates(space, seed))

    def describe(self, space: Space) -> str:
        """Describe both samplers."""
        return f"{self.first.describe(space)}, then {self.fill.describe(space)}"

    def details(self, space: Space) -> str:
        """Describe both samplers at length."""
        return f"{self.first.details(space)}. Then {self.fill.details(space)}"
