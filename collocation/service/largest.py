"""The largest batch that fits, in few tries: memory is nearly a straight line in the batch."""

from collections.abc import Awaitable, Callable

MOST_TRIES = 14
_LARGEST = 2**20


async def largest_batch(
    safe_mib: Callable[[int], Awaitable[float]], capacity_mib: float, start: int, most_tries: int = MOST_TRIES
) -> int:
    """The largest batch whose safe figure is within the capacity, 0 if none is; `start` is where to look first.

    After so many tries it is the largest that is known to fit.
    """
    known: dict[int, float] = {}
    low, high = 0, _LARGEST + 1  # fits, does not
    guess = start
    while high - low > 1 and len(known) < most_tries:
        known[guess] = await safe_mib(guess)
        if known[guess] <= capacity_mib:
            low = guess
        else:
            high = guess
        guess = _next(known, low, high, capacity_mib)
    return low


def _next(known: dict[int, float], low: int, high: int, capacity_mib: float) -> int:
    """Where the line through the two nearest points meets the capacity; the middle where it tells nothing."""
    first, second = _nearest(known, low, high)
    if second is None:  # one point alone: half, or the double
        guess = 2 * low if low else high // 2
    else:
        slope = (known[second] - known[first]) / (second - first)
        guess = int(first + (capacity_mib - known[first]) / slope) if slope > 0 else (low + high) // 2
    if len(known) > 5 and len(known) % 2:  # a line that is none would creep
        guess = (low + high) // 2 if high <= _LARGEST else 4 * max(low, 1)
    return min(max(guess, low + 1), high - 1)


def _nearest(known: dict[int, float], low: int, high: int) -> tuple[int, int | None]:
    if low in known and high in known:
        return low, high
    points = sorted(known, reverse=low in known)[:2]
    return points[0], points[1] if len(points) > 1 else None
