"""Chooses the smallest orthogonal array for any list of level counts."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from math import prod
from typing import NamedTuple

import numpy as np

from vramcast.dataset_builder.arrays import catalogue, strength_three
from vramcast.dataset_builder.arrays.catalogue import Host, demand, greedy_hosts, notation
from vramcast.dataset_builder.arrays.fields import IntArray, prime_power
from vramcast.dataset_builder.arrays.packing import Inner, Packing, build, describe, pack
from vramcast.dataset_builder.arrays.verify import Balance, verify


@dataclass(frozen=True, eq=False)
class OrthogonalArray:
    """An array with its construction and its counted balance."""

    runs: IntArray
    """One run per row; column j holds 0..levels[j]-1."""
    levels: tuple[int, ...]
    strength: int
    """The requested strength, at most the number of columns; `balance` says whether it is reached."""
    construction: str
    balance: Balance

    @property
    def notation(self) -> str:
        """Short form of the array, such as L18(2^1 3^7)."""
        return notation(len(self.runs), self.levels)


def orthogonal_array(levels: Sequence[int], strength: int = 2, max_runs: int | None = None) -> OrthogonalArray:
    """Return the array with the fewest runs that has columns of these levels; among equals the best balanced one.

    Surplus levels of a host column are merged as evenly as possible. Every combination of levels of any `strength`
    columns then still occurs, but not always equally often: see `balance`.
    Raises ValueError for invalid arguments, and if `max_runs` is too small.
    """
    counts = _checked(levels, strength)
    order = sorted((j for j, level in enumerate(counts) if level > 1), key=lambda j: -counts[j])
    sizes = [counts[j] for j in order]
    plan = _plan(sizes, min(strength, len(sizes)))
    if max_runs is not None and plan.runs > max_runs:
        raise ValueError(
            f"expected an array of at most {max_runs} runs, found {notation(plan.runs, counts)} of strength "
            f"{strength} as the smallest: raise max_runs to {plan.runs}, or use fewer factors or levels"
        )
    runs = np.zeros((plan.runs, len(counts)), dtype=np.int64)
    runs[:, order] = plan.build()
    constant = len(counts) - len(order)
    added = f", {constant} constant column{'s' if constant > 1 else ''} added" if constant and order else ""
    balance = verify(runs, counts, strength)
    return OrthogonalArray(runs, counts, balance.strength, plan.construction + added, balance)


def _checked(levels: Sequence[int], strength: int) -> tuple[int, ...]:
    if strength not in (1, 2, 3):
        raise ValueError(f"expected a strength of 1, 2 or 3, found {strength!r}: use one of these")
    try:
        counts = tuple(operator.index(level) for level in levels)
    except TypeError:
        raise ValueError(f"expected whole numbers of levels, found {levels!r}: give one integer per factor") from None
    if not counts or min(counts) < 1:
        raise ValueError(f"expected one factor or more with 1 level or more each, found {list(counts)}: fix the list")
    return counts


class _ArrayPlan(NamedTuple):
    """An array that is not built yet: one with more than `max_runs` may be too large to build."""

    runs: int
    construction: str
    build: Callable[[], IntArray]


def _plan(sizes: list[int], strength: int) -> _ArrayPlan:
    """Return the plan of an array for these levels (descending, all above 1)."""
    if not sizes:
        return _ArrayPlan(1, "one run of constant columns", lambda: np.zeros((1, 0), dtype=np.int64))
    if strength == 1:
        name = f"levels in turn, {sizes[0]} runs"
        return _ArrayPlan(sizes[0], name, lambda: np.arange(sizes[0])[:, None] % np.array(sizes))
    packing = _smallest(sizes, strength)
    return _ArrayPlan(packing.host.runs, describe(packing, sizes), lambda: build(packing, sizes))


def _smallest(sizes: list[int], strength: int) -> Packing:
    inner: Inner = catalogue.inner_hosts if strength == 2 else strength_three.inner_hosts
    for _, hosts in groupby(_hosts(sizes, strength), key=lambda host: host.runs):
        best = _best(hosts, sizes, inner)
        if best:
            return best
    raise AssertionError(f"no array for {sizes}: even the full factorial did not fit")


def _best(hosts: Iterable[Host], sizes: list[int], inner: Inner) -> Packing | None:
    best: Packing | None = None
    for host in hosts:
        packing = pack(host, sizes, inner)
        if packing and (best is None or packing.cost < best.cost):
            best = packing
        if best and not any(best.cost):
            break
    return best


def _hosts(sizes: list[int], strength: int) -> Iterator[Host]:
    """Yield all hosts in order of their runs."""
    if strength == len(sizes):
        return iter([strength_three.factorial_host(sizes)])
    return _hosts_of_two(sizes) if strength == 2 else _hosts_of_three(sizes)


def _hosts_of_two(sizes: list[int]) -> Iterator[Host]:
    needs = demand(sizes)
    # A lower bound for any host: every pair of levels must occur, and Rao's bound holds.
    fewest = max(sizes[0] * sizes[1], 1 + sum(sizes) - len(sizes))
    for runs in count(fewest):
        yield from catalogue.hosts(runs, needs)
        yield from greedy_hosts(runs, sizes, 2)
        if runs == prod(sizes):
            yield strength_three.factorial_host(sizes)


def _hosts_of_three(sizes: list[int]) -> Iterator[Host]:
    fewest = max(prod(sizes[:3]), sizes[0] * (1 + sum(sizes[1:]) - len(sizes[1:])))
    candidates = strength_three.hosts(sizes)
    most = candidates[-1].runs
    powers = [n for n in range(fewest, min(most, catalogue.LARGEST_GREEDY) + 1) if prime_power(n)]
    for runs in sorted({host.runs for host in candidates} | set(powers)):
        yield from (host for host in candidates if host.runs == runs)
        yield from greedy_hosts(runs, sizes, 3)
