"""Sampling from a mixture of spaces: the part by its weight, then the next configuration of that part."""

from collections.abc import Iterator
from zlib import crc32

import numpy as np

from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.samplers.uniform import UniformSampler
from vramcast.dataset_builder.space import Assignment, Space, SpaceMixture

_SEEDS = 2**32


class MixedSampler(Sampler):
    """Yields configurations of all parts in random order, so that any beginning of the stream is a fair sample.

    Every part has a stream of its own by the given sampler; parts that the mixture says are drawn have uniform draws.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.uniform = UniformSampler()

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Yield a part and the values of its factors; a part whose stream ends is left out."""
        mixture = _mixture(space)
        streams = {
            name: self._of(mixture, name).candidates(part, (seed + crc32(name.encode())) % _SEEDS)
            for name, part in mixture.parts.items()
            if mixture.weights[name]
        }
        rng = np.random.RandomState(seed)
        while streams:
            weights = np.array([mixture.weights[name] for name in streams])
            name = list(streams)[int(np.searchsorted(np.cumsum(weights / weights.sum()), rng.random_sample()))]
            values = next(streams[name], None)
            if values is None:
                del streams[name]
            else:
                yield {"part": name, "values": values}

    def describe(self, space: Space) -> str:
        """Describe the number of parts."""
        return f"{len(_mixture(space).parts)} spaces, each with {type(self.sampler).__name__} or uniform draws"

    def details(self, space: Space) -> str:
        """Describe every part."""
        mixture = _mixture(space)
        return "; ".join(
            f"{name} with weight {mixture.weights[name]:g}: {self._of(mixture, name).describe(part)}"
            for name, part in mixture.parts.items()
        )

    def _of(self, mixture: SpaceMixture, name: str) -> Sampler:
        return self.uniform if name in mixture.drawn else self.sampler


def _mixture(space: Space) -> SpaceMixture:
    if not isinstance(space, SpaceMixture):
        raise TypeError(f"a mixed sampler draws from a mixture, not from {space.name}")
    return space
