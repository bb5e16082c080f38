"""Fits the asked columns into the columns of a host: surplus levels cost balance, the least cost is sought.

A host column of m levels serves an asked one of at most m levels (see `dealing`). It may also be replaced by
an array with m runs, and then serves several asked columns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from vramcast.dataset_builder.arrays.catalogue import Host
from vramcast.dataset_builder.arrays.dealing import deal, surplus_share
from vramcast.dataset_builder.arrays.fields import IntArray

LARGEST_OPENED = 128
"""Columns of more levels are not replaced here: the catalogue lists the hosts that have them replaced."""


@dataclass(frozen=True)
class Place:
    """Where an asked column comes from: a column of the host, or of an array that replaces such a column."""

    path: tuple[tuple[Host, int], ...]

    @property
    def levels(self) -> int:
        """How many levels the column has there."""
        host, column = self.path[-1]
        return host.levels[column]


@dataclass(frozen=True)
class Packing:
    """The places of the asked columns, in the order in which these were given, and what it costs."""

    host: Host
    places: tuple[Place, ...]
    loss: tuple[float, float]
    """Share of the runs with a surplus level in one of the worst two columns; sum of all columns' shares."""

    @property
    def cost(self) -> tuple[float, float, int]:
        """By what two packings with equally many runs compare: the loss, then how much had to be replaced."""
        return *self.loss, sum(len(place.path) - 1 for place in self.places)


Inner = Callable[[int], Sequence[Host]]
Free = dict[int, list[Place]]


def pack(host: Host, asked: Sequence[int], inner: Inner) -> Packing | None:
    """The best packing of the asked levels, which must come in descending order; None if they do not fit."""
    found = []
    for choose in (_plain, _opening):
        places = _places(host, asked, inner, choose)
        if places is not None:
            loss = _loss([(place.levels, level) for place, level in zip(places, asked, strict=True)])
            found.append(Packing(host, tuple(places), loss))
    return min(found, key=lambda packing: packing.cost, default=None)


def _loss(pairs: list[tuple[int, int]]) -> tuple[float, float]:
    shares = sorted((surplus_share(*pair) for pair in pairs), reverse=True)
    either = 1 - prod(1 - share for share in shares[:2])
    # Rounded, because one and the same loss summed in another order must compare as equal.
    return round(either, 9), round(sum(shares), 9)


def _places(
    host: Host, asked: Sequence[int], inner: Inner, choose: Callable[[int, Free, Inner], int | None]
) -> list[Place] | None:
    free: Free = defaultdict(list)
    for column, offered in enumerate(host.levels):
        if len(free[offered]) < len(asked):  # some hosts have thousands of columns, and no more will be needed
            free[offered].insert(0, Place(((host, column),)))
    places = []
    for level in asked:
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
    """The free column with the least loss, and of those the smallest."""
    return min((size for size in free if size >= level), key=lambda m: (surplus_share(m, level), m), default=None)


def _opening(level: int, free: Free, inner: Inner) -> int | None:
    """The tightest column, larger ones being replaced by arrays: what holds the most columns."""
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
    """Replaces a free column by the columns of an array."""
    place = _take(free, size)
    for column in reversed(range(len(host.levels))):
        free[host.levels[column]].append(Place((*place.path, (host, column))))


def build(packing: Packing, asked: Sequence[int]) -> IntArray:
    """The array with the asked columns."""
    needed = sorted({place.path[0][1] for place in packing.places})
    base = packing.host.build(needed)
    columns = []
    for place in packing.places:
        values = base[:, needed.index(place.path[0][1])]
        for host, column in place.path[1:]:
            values = host.build([column])[values, 0]
        columns.append(values)
    return deal(np.column_stack(columns), [place.levels for place in packing.places], asked)


def describe(packing: Packing, asked: Sequence[int]) -> str:
    """The host's name, and what was replaced, dropped and merged."""
    opened = {place.path[: i + 1] for place in packing.places for i in range(1, len(place.path))}
    replaced = {(path[:-1], path[-1][0]) for path in opened}
    kinds = Counter((path[-1][0].levels[path[-1][1]], host) for path, host in replaced)
    total = len(packing.host.levels) + sum(len(host.levels) - 1 for _, host in replaced)
    merged = Counter((p.levels, level) for p, level in zip(packing.places, asked, strict=True) if p.levels > level)
    notes = chain(
        (f"{_columns(n)} of {size} levels replaced by {_powers(h)}" for (size, h), n in sorted(kinds.items(), key=_by)),
        [f"{_columns(total - len(asked))} dropped"] if total > len(asked) else [],
        (f"{size}->{level} levels in {_columns(n)}" for (size, level), n in sorted(merged.items())),
    )
    return ", ".join([packing.host.name, *notes])


def _by(item: tuple[tuple[int, Host], int]) -> tuple[int, str]:
    (size, host), _ = item
    return size, host.name


def _columns(number: int) -> str:
    return f"{number} column" if number == 1 else f"{number} columns"


def _powers(host: Host) -> str:
    return " ".join(f"{level}^{count}" for level, count in sorted(Counter(host.levels).items()))
