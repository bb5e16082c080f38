"""Uniform sampling, as GPUMemNet does it."""

from collections.abc import Iterator

import numpy as np

from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.space import Assignment, Space


class UniformSampler(Sampler):
    """Draws every factor independently.

    It uses numpy's RandomState, whose stream is frozen: with seed 99 and a GPUMemNet preset it draws the exact
    configurations of that project.
    """

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Yield an unbounded stream of draws."""
        rng = np.random.RandomState(seed)
        while True:
            yield space.draw(rng)

    def describe(self, space: Space) -> str:
        """Describe the draws."""
        return f"uniform draws of {len(space.factors)} factors"
