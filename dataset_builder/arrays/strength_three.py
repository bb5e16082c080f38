"""The hosts of strength 3: caps, fold-overs, independent subspaces, and direct products of these."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement, count
from math import prod

import numpy as np

from vramcast.dataset_builder.arrays.catalogue import Demand, Host, demand, notation, offers, single
from vramcast.dataset_builder.arrays.constructions import fold_over, full_factorial, hadamard_array
from vramcast.dataset_builder.arrays.fields import IntArray, divisors, prime_power
from vramcast.dataset_builder.arrays.geometry import cap, cap_size, linear_array
from vramcast.dataset_builder.arrays.hadamard import hadamard_source


def cap_host(levels: int, k: int) -> Host:
    """Return OA(s^k, f, s, 3) from a cap."""
    columns = cap_size(levels, k)
    runs = levels**k
    source = "Bush" if k == 3 else "cap"
    return Host(
        runs,
        (levels,) * columns,
        f"{source} OA({runs}, {columns}, {levels}, 3)",
        lambda wanted: linear_array(levels, cap(levels, k)[list(wanted)]),
    )


def fold_host(order: int) -> Host:
    """Return OA(2 order, order, 2, 3) from a Hadamard matrix."""
    return Host(
        2 * order,
        (2,) * order,
        f"fold-over OA({2 * order}, {order}, 2, 3) ({hadamard_source(order)})",
        lambda wanted: fold_over(hadamard_array(order))[:, list(wanted)],
    )


def factorial_host(levels: Sequence[int]) -> Host:
    """Return the host with every combination of the levels."""
    name = f"full factorial {' x '.join(str(level) for level in levels)}"
    return Host(prod(levels), tuple(levels), name, lambda wanted: full_factorial(levels)[:, list(wanted)])


def product_host(parts: Sequence[Host], paired: int = 0) -> Host:
    """Combine every run of each part with every run of the others; merge the first `paired` columns of two parts."""
    own = [(part, column) for part in range(len(parts)) for column in range(paired, len(parts[part].levels))]
    sources = [((0, i), (1, i)) for i in range(paired)] + [(entry,) for entry in own]
    levels = tuple(prod(parts[part].levels[column] for part, column in source) for source in sources)
    sizes = [part.runs for part in parts]

    def build(wanted: Sequence[int]) -> IntArray:
        index = full_factorial(sizes)
        columns = []
        for number in wanted:
            values = np.zeros(len(index), dtype=np.int64)
            for part, column in sources[number]:
                values = values * parts[part].levels[column] + parts[part].build([column])[index[:, part], 0]
            columns.append(values)
        return np.column_stack(columns)

    kind = "Kronecker product" if paired else "product"
    name = f"{kind} of {' and '.join(part.name for part in parts)}: {notation(prod(sizes), levels)}"
    return Host(prod(sizes), levels, name, build)


def upper_bound(requested: Sequence[int]) -> int:
    """Return a sufficient number of runs: of the full factorial, or of one cap with enough columns and levels."""
    best = prod(requested)
    for levels in count(max(requested)):
        if levels**3 >= best:
            return best
        if prime_power(levels):
            best = min(best, next(levels**k for k in count(3) if cap_size(levels, k) >= len(requested)))
    raise AssertionError("the count above does not end")


def hosts(requested: Sequence[int]) -> list[Host]:
    """Return the hosts of strength 3 that may hold the requested levels (descending), by their runs."""
    needs, most = demand(requested), upper_bound(requested)
    atoms = [*_atoms(requested, most), *(single(level) for level in sorted(set(requested)))]
    candidates = [factorial_host(requested)] if prod(requested) == most else []
    for number in (1, 2, 3):
        for parts in combinations_with_replacement(atoms, number):
            if prod(part.runs for part in parts) <= most:
                candidates += _products(parts, needs, requested)
    return sorted(candidates, key=lambda host: host.runs)


def _products(parts: tuple[Host, ...], needs: Demand, requested: Sequence[int]) -> Iterator[Host]:
    if offers(Counter(level for part in parts for level in part.levels), needs, 3):
        yield parts[0] if len(parts) == 1 else product_host(parts)
    if len(parts) != 2:
        return
    largest = max(part.levels[0] for part in parts)
    pairs = sum(level > largest for level in requested)
    if 0 < pairs <= min(len(part.levels) for part in parts) and requested[0] <= prod(p.levels[0] for p in parts):
        host = product_host(parts, pairs)
        if offers(Counter(host.levels), needs, 3):
            yield host


def _atoms(requested: Sequence[int], most: int) -> Iterator[Host]:
    """Yield caps and fold-overs, none longer than necessary."""
    for levels in range(2, round(most ** (1 / 3)) + 1):
        if prime_power(levels):
            for k in count(3):
                if levels**k > most:
                    break
                yield cap_host(levels, k)
                if cap_size(levels, k) >= len(requested):
                    break
    for order in range(12, min(len(requested) + 4, most // 2 + 1), 4):
        if hadamard_source(order) and order & (order - 1):
            yield fold_host(order)


@cache
def inner_hosts(runs: int) -> tuple[Host, ...]:
    """Return the arrays of strength 3 that may replace one column of `runs` levels."""
    pairs = [(a, runs // a) for a in divisors(runs)[1:] if a * a <= runs]
    triples = [(a, *inner.levels) for a, b in pairs for inner in inner_hosts(b) if len(inner.levels) == 2]
    candidates = [factorial_host(levels) for levels in [*pairs, *triples]]
    power = prime_power(runs)
    for divisor in range(3, power[1] + 1) if power else ():
        if power and power[1] % divisor == 0:
            candidates.append(cap_host(power[0] ** (power[1] // divisor), divisor))
    if runs % 2 == 0 and runs > 4 and hadamard_source(runs // 2) and not power:
        candidates.append(fold_host(runs // 2))
    return tuple(candidates)
