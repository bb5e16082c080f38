"""Orthogonal coverage first, uniform fill after."""

from collections.abc import Iterator
from itertools import chain

from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.samplers.uniform import UniformSampler
from vramcast.dataset_builder.space import Assignment, Space


class CombinedSampler(Sampler):
    """All that one sampler has to say, then uniform draws without end."""

    def __init__(self, first: Sampler) -> None:
        self.first = first
        self.fill = UniformSampler()

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """The first sampler's assignments, then uniform draws."""
        return chain(self.first.candidates(space, seed), self.fill.candidates(space, seed))

    def describe(self, space: Space) -> str:
        """Both in a line."""
        return f"{self.first.describe(space)}; then {self.fill.describe(space)}"
