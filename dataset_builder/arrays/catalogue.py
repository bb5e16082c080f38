"""The arrays that can be built, described by their runs and the levels of their columns; built only when chosen.

A host is an array whose columns serve the requested ones. Two bounds keep the search short: a demand lists, for each
requested level t, how many columns need at least t levels; `room` bounds how many columns of at least t levels can
replace one column of m levels.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from vramcast.dataset_builder.arrays import stored_matrices
from vramcast.dataset_builder.arrays.constructions import developed, hadamard_array, hadamard_with_four
from vramcast.dataset_builder.arrays.differences import Scheme, best_scheme
from vramcast.dataset_builder.arrays.fields import IntArray, divisors, prime_power
from vramcast.dataset_builder.arrays.geometry import (
    digits_for,
    greedy_subspaces,
    subfield_classes,
    subfield_subspaces,
    subspace_array,
)
from vramcast.dataset_builder.arrays.hadamard import hadamard_source

LARGEST_GREEDY = 1024
"""Largest number of runs for which subspaces are searched: the addition table of larger ones takes too much memory."""

Demand = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Host:
    """An array that can be built, and whose columns may serve the requested ones."""

    runs: int
    levels: tuple[int, ...]
    name: str
    build: Callable[[Sequence[int]], IntArray]
    """Build the columns with these indices."""


def notation(runs: int, levels: Iterable[int]) -> str:
    """Return the usual short form, such as L18(2^1 3^7)."""
    counts = sorted(Counter(levels).items())
    return f"L{runs}({' '.join(f'{level}^{count}' for level, count in counts)})"


def demand(levels: Iterable[int]) -> Demand:
    """Return, for each requested level, how many columns need at least as many levels."""
    counts = Counter(levels)
    ordered = sorted(counts, reverse=True)
    return tuple(zip(ordered, accumulate(counts[level] for level in ordered), strict=True))


def room(size: int, level: int, strength: int) -> int:
    """Return Rao's bound (1947) on the columns of at least `level` levels in an array with `size` runs."""
    if size < level:
        return 0
    for columns in range(1, strength):
        if size < level ** (columns + 1):
            return columns
    if strength == 2:
        return (size - 1) // (level - 1)
    return 1 + (size // level - 1) // (level - 1)


def offers(kinds: Mapping[int, int], needs: Demand, strength: int) -> bool:
    """Return whether columns of these kinds have room for a demand: a necessary condition, not a sufficient one."""
    return all(
        sum(number * room(size, level, strength) for size, number in kinds.items()) >= count for level, count in needs
    )


def _less(needs: Demand, size: int, columns: int) -> Demand:
    """Return the demand that is left after `columns` columns of this size."""
    return tuple((level, count - columns * room(size, level, 2)) for level, count in needs)


def single(runs: int) -> Host:
    """Return the host with one column in which each run has its own level."""
    return _whole(runs, (runs,), f"one column of {runs} levels", lambda: np.arange(runs)[:, None])


def _whole(runs: int, levels: Sequence[int], name: str, build: Callable[[], IntArray]) -> Host:
    return Host(runs, tuple(levels), name, lambda columns: build()[:, list(columns)])


def hosts(runs: int, needs: Demand = ()) -> Iterator[Host]:
    """Yield the arrays of strength 2 with this number of runs that may meet the demand."""
    special = [*_hadamard_hosts(runs, needs), *_subfield_hosts(runs)]
    seen = set()
    for host in [*special, *_developed_hosts(runs, needs), *_hosts_with_four(runs, needs)]:
        kinds = Counter(host.levels)
        key = frozenset(kinds.items())
        if key not in seen and offers(kinds, needs, 2):
            seen.add(key)
            yield host


def _hadamard_hosts(runs: int, needs: Demand) -> Iterator[Host]:
    source = hadamard_source(runs)
    if source and runs >= 4 and all(level == 2 or count <= 0 for level, count in needs):
        name = f"Hadamard OA({runs}, {runs - 1}, 2, 2) ({source})"
        yield _whole(runs, (2,) * (runs - 1), name, lambda: hadamard_array(runs))
    columns = stored_matrices.block_columns(runs)
    if columns:
        levels = (runs // 4, *(2,) * columns)
        yield _whole(runs, levels, f"stored {notation(runs, levels)}", lambda: stored_matrices.block_array(runs))


def _subfield_hosts(runs: int) -> Iterator[Host]:
    power = prime_power(runs)
    if power and power[1] == 6 and runs <= LARGEST_GREEDY:
        for classes in range(1, subfield_classes(power[0])):
            yield _subfield_host(power[0], classes)


def _subfield_host(prime: int, classes: int) -> Host:
    share = classes / subfield_classes(prime)
    wide, narrow = round(share * (prime**3 + 1)), round((1 - share) * (prime**6 - 1) / (prime**2 - 1))
    levels = (prime**3,) * wide + (prime**2,) * narrow
    name = f"multiples of subfields of GF({prime**6}): {notation(prime**6, levels)}"
    return _whole(prime**6, levels, name, lambda: subspace_array(prime, 6, subfield_subspaces(prime, classes)))


def _developed_hosts(runs: int, needs: Demand) -> Iterator[Host]:
    """Yield D(r, c, s) over every array with r runs; s > r is skipped, because exchanging both is as good."""
    for levels in divisors(runs)[1:]:
        rows = runs // levels
        if levels > rows:
            break
        # Try the upper bound on a scheme's columns first: computing their real number takes longer.
        if not _leaves_room(rows, _less(needs, levels, rows if rows % levels == 0 else 1)):
            continue
        scheme = best_scheme(rows, levels)
        left = _less(needs, levels, scheme.columns)
        if _leaves_room(rows, left):
            for tail in [single(rows), *hosts(rows, left)]:
                yield _developed_host(scheme, tail)


def _leaves_room(rows: int, left: Demand) -> bool:
    return all(room(rows, level, 2) >= count for level, count in left)


def _developed_host(scheme: Scheme, tail: Host) -> Host:
    def build(columns: Sequence[int]) -> IntArray:
        heads = [column for column in columns if column < scheme.columns]
        tails = [column - scheme.columns for column in columns if column >= scheme.columns]
        array = developed(scheme.build()[:, heads], scheme.levels, tail.build(tails))
        return array[:, np.argsort(np.argsort([c >= scheme.columns for c in columns], kind="stable"))]

    levels = (scheme.levels,) * scheme.columns + tail.levels
    runs = scheme.rows * scheme.levels
    return Host(runs, levels, _developed_name(runs, levels, scheme, tail), build)


def _developed_name(runs: int, levels: tuple[int, ...], scheme: Scheme, tail: Host) -> str:
    power = prime_power(runs)
    if power:
        level = power[0] if len(set(levels)) > 1 else levels[0]
        columns = (runs - 1) // (level - 1)
        base = f"Rao-Hamming OA({runs}, {columns}, {level}, 2)"
        return base if columns == len(levels) else f"{base} with columns replaced: {notation(runs, levels)}"
    if len(levels) == 2:
        return f"full factorial {levels[0]} x {levels[1]}"
    counts = Counter(levels)
    if scheme.levels % 2 and prime_power(runs // 2) and counts == {scheme.levels: len(levels) - 1, 2: 1}:
        return f"Addelman-Kempthorne OA({runs}, {len(levels) - 1}, {scheme.levels}, 2) and a column of 2 levels"
    return f"difference scheme {scheme} over {tail.name}"


def _hosts_with_four(runs: int, needs: Demand) -> Iterator[Host]:
    rows = runs // 2
    if runs % 8 == 0 and not prime_power(runs) and hadamard_source(rows):
        for tail in hosts(rows, _less(_less(needs, 2, rows - 2), 4, 1)):
            if 2 in tail.levels:
                yield _host_with_four(tail)


def _host_with_four(tail: Host) -> Host:
    rows, column = tail.runs, tail.levels.index(2)
    levels = (4, *(2,) * (rows - 2), *tail.levels[:column], *tail.levels[column + 1 :])
    name = f"Hadamard matrix of order {rows} developed with a column of 4 levels over {tail.name}"
    every = range(len(tail.levels))
    return _whole(2 * rows, levels, name, lambda: hadamard_with_four(rows, tail.build(every), column))


def greedy_hosts(runs: int, levels: Sequence[int], strength: int) -> Iterator[Host]:
    """Search independent subspaces of GF(p)^k for exactly these levels (descending), if the runs are p^k."""
    power = prime_power(runs)
    if power is None or runs > LARGEST_GREEDY:
        return
    prime, length = power
    dimensions = [digits_for(prime, level) for level in levels]
    sizes = tuple(prime**dimension for dimension in dimensions)
    if sum(sizes) - len(sizes) >= runs:
        return
    subspaces = greedy_subspaces(prime, length, dimensions, strength)
    if subspaces is not None:
        name = f"independent subspaces of GF({prime})^{length}: {notation(runs, sizes)}"
        yield _whole(runs, sizes, name, lambda: subspace_array(prime, length, subspaces))


@cache
def inner_hosts(runs: int) -> tuple[Host, ...]:
    """Return the arrays of strength 2 that may replace one column of `runs` levels."""
    return tuple(hosts(runs))
