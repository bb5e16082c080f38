"""The public entry: the smallest orthogonal array for any list of level counts."""

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
    """An array, where it comes from, and the balance that was counted in it."""

    runs: IntArray
    """One run a row; column j holds 0..levels[j]-1."""
    levels: tuple[int, ...]
    strength: int
    """The strength asked for, but never more than there are columns; `balance` says whether it is reached."""
    construction: str
    balance: Balance

    @property
    def notation(self) -> str:
        """The usual short form, such as L18(2^1 3^7)."""
        return notation(len(self.runs), self.levels)


def orthogonal_array(levels: Sequence[int], strength: int = 2, max_runs: int | None = None) -> OrthogonalArray:
    """The array with the fewest runs that holds columns of these levels; among equals the best balanced one.

    A host column with more levels than asked has them merged, as evenly as can be. Then every combination of
    levels of any `strength` columns still occurs, but not always equally often; `balance` says how far off.
    Raises ValueError for an input that makes no sense, and if `max_runs` is too few.
    """
    asked = _checked(levels, strength)
    order = sorted((j for j, level in enumerate(asked) if level > 1), key=lambda j: -asked[j])
    sizes = [asked[j] for j in order]
    plan = _plan(sizes, min(strength, len(sizes)))
    if max_runs is not None and plan.runs > max_runs:
        raise ValueError(
            f"expected an array of at most {max_runs} runs, found {notation(plan.runs, asked)} of strength "
            f"{strength} as the smallest: raise max_runs to {plan.runs}, or ask for fewer factors or levels"
        )
    runs = np.zeros((plan.runs, len(asked)), dtype=np.int64)
    runs[:, order] = plan.build()
    constant = len(asked) - len(order)
    added = f", {constant} constant column{'s' if constant > 1 else ''} added" if constant and order else ""
    balance = verify(runs, asked, strength)
    return OrthogonalArray(runs, asked, balance.strength, plan.construction + added, balance)


def _checked(levels: Sequence[int], strength: int) -> tuple[int, ...]:
    if strength not in (1, 2, 3):
        raise ValueError(f"expected a strength of 1, 2 or 3, found {strength!r}: ask for one of these")
    try:
        asked = tuple(operator.index(level) for level in levels)
    except TypeError:
        raise ValueError(f"expected whole numbers of levels, found {levels!r}: give one integer a factor") from None
    if not asked or min(asked) < 1:
        raise ValueError(f"expected one factor or more with 1 level or more each, found {list(asked)}: mend the list")
    return asked


class _Plan(NamedTuple):
    """What will be built: known before it is, because an array that is refused may be too large to build."""

    runs: int
    construction: str
    build: Callable[[], IntArray]


def _plan(sizes: list[int], strength: int) -> _Plan:
    """The columns for these levels (descending, all above 1)."""
    if not sizes:
        return _Plan(1, "one run of constant columns", lambda: np.zeros((1, 0), dtype=np.int64))
    if strength == 1:
        name = f"levels in turn, {sizes[0]} runs"
        return _Plan(sizes[0], name, lambda: np.arange(sizes[0])[:, None] % np.array(sizes))
    packing = _smallest(sizes, strength)
    return _Plan(packing.host.runs, describe(packing, sizes), lambda: build(packing, sizes))


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
    """All hosts from the fewest runs on."""
    if strength == len(sizes):
        return iter([strength_three.factorial_host(sizes)])
    return _hosts_of_two(sizes) if strength == 2 else _hosts_of_three(sizes)


def _hosts_of_two(sizes: list[int]) -> Iterator[Host]:
    needs = demand(sizes)
    # Every pair of levels must occur, and Rao's bound holds for any host: no smaller number needs a look.
    fewest = max(sizes[0] * sizes[1], 1 + sum(sizes) - len(sizes))
    for runs in count(fewest):
        yield from catalogue.hosts(runs, needs)
        yield from greedy_hosts(runs, sizes, 2)
        if runs == prod(sizes):
            yield strength_three.factorial_host(sizes)


def _hosts_of_three(sizes: list[int]) -> Iterator[Host]:
    fewest = max(prod(sizes[:3]), sizes[0] * (1 + sum(sizes[1:]) - len(sizes[1:])))
    known = strength_three.hosts(sizes)
    most = known[-1].runs
    powers = [n for n in range(fewest, min(most, catalogue.LARGEST_GREEDY) + 1) if prime_power(n)]
    for runs in sorted({host.runs for host in known} | set(powers)):
        yield from (host for host in known if host.runs == runs)
        yield from greedy_hosts(runs, sizes, 3)
