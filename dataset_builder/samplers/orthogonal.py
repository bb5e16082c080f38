"""Sampling by orthogonal arrays: one array over all factors, or the cross product of TBEM's two arrays."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from vramcast.dataset_builder.arrays import OrthogonalArray, orthogonal_array
from vramcast.dataset_builder.samplers._base import Sampler
from vramcast.dataset_builder.space import Assignment, Space
from vramcast.errors import UserError, check_choice, check_count


class OrthogonalSampler(Sampler):
    """Yields the runs of the smallest orthogonal array over all factors, in a seeded order."""

    def __init__(self, strength: int = 2, max_levels: int | None = None) -> None:
        check_choice("sampler.strength", strength, (2, 3))
        self.strength = strength
        if max_levels is not None:
            check_count("sampler.max_levels", max_levels, least=2)
        self.max_levels = max_levels

    def array(self, space: Space, names: Sequence[str]) -> OrthogonalArray:
        """Return the smallest array over these factors of the space."""
        counts = [space.factors[name].level_count for name in names]
        return _cached_array(tuple(min(count, self.max_levels or count) for count in counts), self.strength)

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Yield each run of the array once."""
        names = list(space.factors)
        array = self.array(space, names)
        for index in np.random.RandomState(seed).permutation(len(array.runs)):
            yield _assign(space, dict(zip(names, zip(array.runs[index], array.levels, strict=True), strict=True)))

    def describe(self, space: Space) -> str:
        """Describe the array and which combinations of levels occur in it."""
        array = self.array(space, list(space.factors))
        return f"an orthogonal array of {len(array.runs)} runs ({array.balance.occurrence()} in it)"

    def details(self, space: Space) -> str:
        """Describe the array, its construction and its balance."""
        array = self.array(space, list(space.factors))
        return f"{array.notation} by {array.construction}: {array.balance.describe(list(space.factors))}"


class TbemSampler(OrthogonalSampler):
    """TBEM's Algorithm 1: one array mutates the structure of a template, a second assigns the hyper-parameters.

    Every structure is combined with every assignment, and each structure gets one assignment before any gets a second.
    """

    def candidates(self, space: Space, seed: int) -> Iterator[Assignment]:
        """Yield the cross product of the runs of both arrays."""
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
        """Describe the size of both arrays."""
        shapes, settings = self._arrays(space)
        return f"{len(shapes.runs)} structures x {len(settings.runs)} assignments of hyper-parameters"

    def details(self, space: Space) -> str:
        """Describe both arrays and their balance."""
        shapes, settings = self._arrays(space)
        structure = f"structure {shapes.notation} ({shapes.balance.describe(space.structure)})"
        balance = settings.balance.describe(_hyper_parameters(space))
        return f"{structure} x hyper-parameters {settings.notation} ({balance})"

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
    """Return the values at these level indices, in factor order: bounds may depend on earlier factors."""
    values: Assignment = {}
    for name, factor in space.factors.items():
        index, count = run[name]
        values[name] = factor.level(int(index), count, values)
    return values
