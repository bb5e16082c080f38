"""Orders of batches for runs whose lengths vary: samples are shuffled, grouped into batches, and padded."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

TRACED_STEPS = 5
"""A first step, which makes the optimizer's state, one that fills caches of the network, such as positions up to the
longest, and one of each traced length."""
STEP_BATCHES = 4
"""Batches of a traced step: a first one, two like all others, and one with the optimizer's step."""
_ALIGNMENT = 8
"""Kernels for lengths that are a multiple of it differ from those for most lengths."""
_SHARES = (1.0, 0.89, 0.78)
"""The traced lengths as shares of the longest. Shorter ones are extrapolated, which is exact for a polynomial."""
SHORTEST = 64
"""Below it, shares of a length are too close to each other."""
ORDERS = 9
"""The median and the spread of as many orders are stable to some percent."""
_NEAR_LONGEST = 0.95
MOST_BATCHES = 400
"""The cache grows ever more slowly: most of its growth is over by then."""


@dataclass(frozen=True)
class LengthOrders:
    """The lengths of batches in several orders, any of which a run may have."""

    traced: tuple[int, ...]
    """The length of each step to trace."""
    orders: tuple[tuple[int, ...], ...]
    accumulate: int = 1
    """Batches of an optimizer step."""

    @classmethod
    def of_samples(cls, samples: Sequence[int], batch_size: int, accumulate: int = 1, count: int = ORDERS) -> Self:
        """Draw orders of samples of these lengths; each batch is padded to its longest sample."""
        orders = tuple(_order(samples, batch_size, seed) for seed in range(count))
        return cls(traced_lengths([length for order in orders for length in order]), orders, accumulate)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `asdict` returned."""
        orders = tuple(tuple(order) for order in values["orders"])
        return cls(tuple(values["traced"]), orders, values["accumulate"])


def traced_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the length of each step to trace for batches of these lengths.

    They are close to the longest, which decides most: some kernels change with the length, and steps must be alike.
    """
    longest = max(*lengths, SHORTEST)
    typical = sorted(lengths)[len(lengths) // 2]
    steps = tuple(_unaligned(round(share * longest)) for share in _SHARES)
    return (typical, max(steps), *steps)


def _unaligned(length: int) -> int:
    return length - 1 if length % _ALIGNMENT == 0 else length


def _order(samples: Sequence[int], batch_size: int, seed: int) -> tuple[int, ...]:
    """Return the first batches of a shuffled run; a long batch that is not among them takes the place of another."""
    generator = random.Random(seed)  # noqa: S311 - no secret
    shuffled = list(samples)
    generator.shuffle(shuffled)
    starts = range(0, len(shuffled), batch_size)
    batches = [max(shuffled[start : start + batch_size]) for start in starts]
    chosen = batches[:MOST_BATCHES]
    if max(chosen) < _NEAR_LONGEST * max(batches):
        chosen[generator.randrange(len(chosen))] = max(batches)
    return tuple(chosen)
