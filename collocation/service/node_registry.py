"""What nodes told of their GPUs a moment ago."""

import time
from collections.abc import Callable

from vramcast.collocation.placement import GpuState


class NodeRegistry:
    """What was told of nodes, for requests that name them alone; forgotten after a while, since memory fills up."""

    def __init__(self, seconds: float = 60.0, most: int = 20_000, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.most = most
        self._clock = clock
        self._known: dict[str, tuple[float, list[GpuState]]] = {}

    def note(self, name: str, gpus: list[GpuState]) -> None:
        """Keep what a node has."""
        self._known.pop(name, None)
        self._known[name] = (self._clock(), gpus)
        while len(self._known) > self.most:
            del self._known[next(iter(self._known))]

    def get(self, name: str) -> list[GpuState] | None:
        """What it had a moment ago, None where that is not known."""
        when, gpus = self._known.get(name, (float("-inf"), []))
        return gpus if self._clock() - when <= self.seconds else None

    def __len__(self) -> int:
        return len(self._known)
