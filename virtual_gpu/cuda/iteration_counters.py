"""Numbers that count the iterations of a script, and the values of them that its conditions ask for."""

from collections.abc import Callable, Iterable, Iterator

Conditions = Iterable[Callable[[], object]]
"""Functions that evaluate an expression of the script."""
_Key = tuple[int, int]


class IterationCounter:
    """The values of a number that a script asks for: multiples of its divisors, and what is near a bound.

    `if step % 500 == 0`, `if (step + 1) % 500 == 0` and `if step == last - 1` hold at one of them.
    """

    def __init__(self) -> None:
        self.visited_at = 0
        """When it went on last, by the clock of `FastForward`."""
        self.steps = -1
        """Optimizer steps until then."""
        self._done: set[_Key] = set()
        self._pending: dict[_Key, int] = {}

    def visit(self, value: int, divisors: Conditions, bounds: Conditions, last: int | None = None) -> None:
        """Note that the number has a value, and find the next ones that are asked for; `last` is the highest."""
        self._pending = {}
        for key, following in _asked(value, divisors, bounds):
            if following == value:
                self._done.add(key)
            elif key not in self._done and (last is None or following <= last):
                self._pending[key] = following

    @property
    def is_pending(self) -> bool:
        """Return True if a value that is asked for is still to come."""
        return bool(self._pending)

    @property
    def following(self) -> int | None:
        """Return the next value that is asked for, None if all were there."""
        return min(self._pending.values(), default=None)


def _asked(value: int, divisors: Conditions, bounds: Conditions) -> Iterator[tuple[_Key, int]]:
    """Yield a key for each value that is asked for, and the first number from the present one on that has it."""
    for divisor in _numbers(divisors):
        if divisor > 1:
            for remainder in (0, divisor - 1):
                yield (divisor, remainder), value + (remainder - value) % divisor
    for bound in _numbers(bounds):
        for near in (bound - 1, bound, bound + 1):
            if near >= value:
                yield (0, near), near


def _numbers(conditions: Conditions) -> Iterator[int]:
    for evaluate in conditions:
        try:
            number = evaluate()
        except Exception:  # noqa: S112 - whatever the names of the script do
            continue
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if type(number) is int and 0 < number < 2**62:
            yield number
