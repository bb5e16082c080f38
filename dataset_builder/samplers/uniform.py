"""Uniform sampling, as GPUMemNet does it."""

from collections.abc import Iterator

import numpy as np

from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.space import Assignment, Space


class UniformSampler(Sampler):
    """Draws every factor by itself.

    The generator is numpy's RandomState: its stream is frozen for good, and with the seed 99 and a GPUMemNet preset it
    draws that project's very configurations.
    """

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Draws without end."""
        rng = np.random.RandomState(seed)
        while True:
            yield space.draw(rng)

    def describe(self, space: Space) -> str:
        """One line for the build's report."""
        return f"uniform draws of {len(space.factors)} factors"
