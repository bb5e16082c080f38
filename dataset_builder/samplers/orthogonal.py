"""Sampling by orthogonal arrays: one array over all factors, or TBEM's two, crossed."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from vramcast.dataset_builder.arrays import OrthogonalArray, orthogonal_array
from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.space import Assignment, Space
from vramcast.errors import UserError, check_choice, check_count


class OrthogonalSampler(Sampler):
    """The runs of the smallest array that holds every factor at its levels, in a seeded order."""

    def __init__(self, strength: int = 2, max_levels: int | None = None) -> None:
        check_choice("sampler.strength", strength, (2, 3))
        self.strength = strength
        if max_levels is not None:
            check_count("sampler.max_levels", max_levels, least=2)
        self.max_levels = max_levels

    def array(self, space: Space, names: Sequence[str]) -> OrthogonalArray:
        """The array over these factors of the space."""
        levels = [
            min(space.factors[name].level_count, self.max_levels or space.factors[name].level_count) for name in names
        ]
        return _cached_array(tuple(levels), self.strength)

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Each run of the array once."""
        names = list(space.factors)
        array = self.array(space, names)
        for index in np.random.RandomState(seed).permutation(len(array.runs)):
            yield _assign(space, dict(zip(names, zip(array.runs[index], array.levels, strict=True), strict=True)))

    def describe(self, space: Space) -> str:
        """The array, and what was lost of its balance."""
        array = self.array(space, list(space.factors))
        return f"{array.notation} by {array.construction}: {array.balance.told(list(space.factors))}"


class TbemSampler(OrthogonalSampler):
    """TBEM's Algorithm 1: an array over the structure mutates a template, a second assigns the hyper-parameters.

    Every structure meets every assignment; the order gives each structure one assignment before any gets a second.
    """

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """The crossed runs of both arrays."""
        shapes, settings = self._arrays(space)
        rng = np.random.RandomState(seed)
        rows, columns = rng.permutation(len(shapes.runs)), rng.permutation(len(settings.runs))
        names = [*space.structure, *_hyper_parameters(space)]
        levels = (*shapes.levels, *settings.levels)
        for shift in range(len(columns)):
            for place, row in enumerate(rows):
                run = (*shapes.runs[row], *settings.runs[columns[(place + shift) % len(columns)]])
                yield _assign(space, dict(zip(names, zip(run, levels, strict=True), strict=True)))

    def describe(self, space: Space) -> str:
        """Both arrays."""
        shapes, settings = self._arrays(space)
        first = f"structure {shapes.notation} ({shapes.balance.told(space.structure)})"
        return f"{first} x hyper-parameters {settings.notation} ({settings.balance.told(_hyper_parameters(space))})"

    def _arrays(self, space: Space) -> tuple[OrthogonalArray, OrthogonalArray]:
        if not space.structure or not _hyper_parameters(space):
            raise UserError(
                f"expected a space that names its structure factors for sampler=tbem, found none in {space.name}: "
                "use space=template or another sampler"
            )
        return self.array(space, space.structure), self.array(space, _hyper_parameters(space))


@cache
def _cached_array(levels: tuple[int, ...], strength: int) -> OrthogonalArray:
    return orthogonal_array(levels, strength)


def _hyper_parameters(space: Space) -> list[str]:
    return [name for name in space.factors if name not in space.structure]


def _assign(space: Space, run: dict[str, tuple[int, int]]) -> Assignment:
    """Values for level indices, in the order of the factors because bounds may depend on those before."""
    values: Assignment = {}
    for name, factor in space.factors.items():
        index, count = run[name]
        values[name] = factor.level(int(index), count, values)
    return values
