"""Fits requested columns into the columns of a host with the least loss of balance.

A host column of m levels serves a requested one of at most m levels (see `level_merging`). It may also be replaced
by an array with m runs, and then serves several requested columns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from vramcast.dataset_builder.arrays.catalogue import Host
from vramcast.dataset_builder.arrays.fields import IntArray
from vramcast.dataset_builder.arrays.level_merging import merge_levels, surplus_share

LARGEST_OPENED = 128
"""Columns of more levels are not replaced here: the catalogue has hosts in which they are replaced."""


@dataclass(frozen=True)
class Place:
    """The source of a requested column: a column of the host, or of an array that replaces such a column."""

    path: tuple[tuple[Host, int], ...]

    @property
    def levels(self) -> int:
        """Number of levels of the source column."""
        host, column = self.path[-1]
        return host.levels[column]


@dataclass(frozen=True)
class Packing:
    """The places of the requested columns, in their order, and the loss of balance."""

    host: Host
    places: tuple[Place, ...]
    loss: tuple[float, float]
    """Share of the runs with a surplus level in one of the worst two columns; sum of the shares of all columns."""

    @property
    def cost(self) -> tuple[float, float, int]:
        """Sort key of packings with equally many runs: the loss, then the number of replacements."""
        return *self.loss, sum(len(place.path) - 1 for place in self.places)


Inner = Callable[[int], Sequence[Host]]
Free = dict[int, list[Place]]


def pack(host: Host, requested: Sequence[int], inner: Inner) -> Packing | None:
    """Return the best packing of the requested levels (descending), or None if they do not fit."""
    packings = []
    for choose in (_plain, _opening):
        places = _places(host, requested, inner, choose)
        if places is not None:
            loss = _loss([(place.levels, level) for place, level in zip(places, requested, strict=True)])
            packings.append(Packing(host, tuple(places), loss))
    return min(packings, key=lambda packing: packing.cost, default=None)


def _loss(pairs: list[tuple[int, int]]) -> tuple[float, float]:
    shares = sorted((surplus_share(*pair) for pair in pairs), reverse=True)
    either = 1 - prod(1 - share for share in shares[:2])
    # Rounded, because equal losses summed in another order must compare as equal.
    return round(either, 9), round(sum(shares), 9)


def _places(
    host: Host, requested: Sequence[int], inner: Inner, choose: Callable[[int, Free, Inner], int | None]
) -> list[Place] | None:
    free: Free = defaultdict(list)
    for column, offered in enumerate(host.levels):
        if len(free[offered]) < len(requested):  # some hosts have thousands of columns
            free[offered].insert(0, Place(((host, column),)))
    places = []
    for level in requested:
        size = choose(level, free, inner)
        if size is None:
            return None
        places.append(_take(free, size))
    return places


def _take(free: Free, size: int) -> Place:
    place = free[size].pop()
    if not free[size]:
        del free[size]
    return place


def _plain(level: int, free: Free, _: Inner) -> int | None:
    """Return the levels of the free column with the least loss; among equals the smallest."""
    return min((size for size in free if size >= level), key=lambda m: (surplus_share(m, level), m), default=None)


def _opening(level: int, free: Free, inner: Inner) -> int | None:
    """Return the levels of the tightest column, after replacing larger ones by arrays: fits the most columns."""
    if level in free:
        return level
    sizes = sorted(size for size in free if size > level)
    openable = [size for size in sizes if size <= LARGEST_OPENED]
    for size in openable:
        exact = [h for h in inner(size) if level in h.levels and len(h.levels) > 1]
        if exact:
            _open(free, size, max(exact, key=lambda h: h.levels.count(level)))
            return level
    if sizes and sizes[0] < level * level:
        return sizes[0]
    for size in openable:
        wide = max(inner(size), key=lambda h: sum(x >= level for x in h.levels), default=None)
        if wide and sum(x >= level for x in wide.levels) > 1:
            _open(free, size, wide)
            return min(x for x in wide.levels if x >= level)
    return sizes[0] if sizes else None


def _open(free: Free, size: int, host: Host) -> None:
    """Replace a free column by the columns of an array."""
    place = _take(free, size)
    for column in reversed(range(len(host.levels))):
        free[host.levels[column]].append(Place((*place.path, (host, column))))


def build(packing: Packing, requested: Sequence[int]) -> IntArray:
    """Build the array with the requested columns."""
    needed = sorted({place.path[0][1] for place in packing.places})
    base = packing.host.build(needed)
    columns = []
    for place in packing.places:
        values = base[:, needed.index(place.path[0][1])]
        for host, column in place.path[1:]:
            values = host.build([column])[values, 0]
        columns.append(values)
    return merge_levels(np.column_stack(columns), [place.levels for place in packing.places], requested)


def describe(packing: Packing, requested: Sequence[int]) -> str:
    """Describe the host and which columns were replaced, dropped and merged."""
    opened = {place.path[: i + 1] for place in packing.places for i in range(1, len(place.path))}
    replaced = {(path[:-1], path[-1][0]) for path in opened}
    kinds = Counter((path[-1][0].levels[path[-1][1]], host) for path, host in replaced)
    total = len(packing.host.levels) + sum(len(host.levels) - 1 for _, host in replaced)
    merged = Counter((p.levels, level) for p, level in zip(packing.places, requested, strict=True) if p.levels > level)
    notes = chain(
        (
            f"{_columns(n)} of {size} levels replaced by {_powers(h)}"
            for (size, h), n in sorted(kinds.items(), key=_size_and_name)
        ),
        [f"{_columns(total - len(requested))} dropped"] if total > len(requested) else [],
        (f"{size}->{level} levels in {_columns(n)}" for (size, level), n in sorted(merged.items())),
    )
    return ", ".join([packing.host.name, *notes])


def _size_and_name(item: tuple[tuple[int, Host], int]) -> tuple[int, str]:
    (size, host), _ = item
    return size, host.name


def _columns(number: int) -> str:
    return f"{number} column" if number == 1 else f"{number} columns"


def _powers(host: Host) -> str:
    return " ".join(f"{level}^{count}" for level, count in sorted(Counter(host.levels).items()))
