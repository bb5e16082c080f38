"""The GPUs that nodes stated within the last minute."""

import time
from collections import OrderedDict
from collections.abc import Callable

from vramcast.collocation.placement import GpuState

_NODE_BYTES = 600
_GPU_BYTES = 400
"""About what a node and a GPU take in memory, beside their texts."""


class NodeRegistry:
    """GPUs by node, for requests that only name nodes. Bounded by bytes; entries expire, since free memory changes."""

    def __init__(
        self, seconds: float = 60.0, limit_bytes: int = 32 << 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._clock = clock
        self._nodes: OrderedDict[str, tuple[float, list[GpuState]]] = OrderedDict()

    def put(self, name: str, gpus: list[GpuState]) -> None:
        """Keep the GPUs of a node; the oldest entries make room for it."""
        self._drop(name)
        self._nodes[name] = (self._clock(), gpus)
        self.size_bytes += _size_bytes(name, gpus)
        while self._nodes and (self.size_bytes > self.limit_bytes or self._expired(next(iter(self._nodes)))):
            self._drop(next(iter(self._nodes)))

    def get(self, name: str) -> list[GpuState] | None:
        """Return the GPUs of a node, or None if they are unknown."""
        if name not in self._nodes:
            return None
        if self._expired(name):
            self._drop(name)
            return None
        return self._nodes[name][1]

    def __len__(self) -> int:
        return len(self._nodes)

    def _expired(self, name: str) -> bool:
        return self._clock() - self._nodes[name][0] > self.seconds

    def _drop(self, name: str) -> None:
        if name in self._nodes:
            _, gpus = self._nodes.pop(name)
            self.size_bytes -= _size_bytes(name, gpus)


def _size_bytes(name: str, gpus: list[GpuState]) -> int:
    return _NODE_BYTES + 4 * len(name) + sum(_GPU_BYTES + 4 * len(gpu.id) for gpu in gpus)
