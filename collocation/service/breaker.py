"""A circuit breaker: after a failure, a service that did not answer is left alone for some time."""

import time
from collections.abc import Callable


class Breaker:
    """A switch that opens at a failure, and closes after `seconds`."""

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """True if nothing should be asked for now."""
        return self._clock() < self._open_until

    def failed(self) -> None:
        """Open the switch."""
        self._open_until = self._clock() + self._seconds
