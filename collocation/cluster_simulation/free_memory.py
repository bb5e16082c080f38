"""Indices of the free memory of GPUs, so that the choice of GPUs for a job does not look at all of them.

The policies are those of `collocation.placement`, which searches a list of GPUs: too slow for a simulation.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort

from vramcast.collocation.cluster_simulation.rules import BEST_FIT, MOST_FREE

CLOSED = -1
"""The free bytes of a GPU that accepts no job."""


class FreeMemory(ABC):
    """Free bytes by GPU, and the choice of GPUs by a policy."""

    def __init__(self, gpus: int, free_bytes: int) -> None:
        self.free_bytes = [free_bytes] * gpus

    @abstractmethod
    def set(self, gpu: int, free_bytes: int) -> None:
        """Set the free bytes of a GPU."""

    @abstractmethod
    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """Return `count` GPUs with `need_bytes` free each, the preferred one first; None if there are too few."""


class _Sorted(FreeMemory):
    """GPUs in order of free memory. Insertion only moves pointers, so thousands of GPUs are fast enough."""

    def __init__(self, gpus: int, free_bytes: int) -> None:
        super().__init__(gpus, free_bytes)
        self.order = sorted(self._key(gpu) for gpu in range(gpus))

    def set(self, gpu: int, free_bytes: int) -> None:
        """Set the free bytes of a GPU."""
        del self.order[bisect_left(self.order, self._key(gpu))]
        self.free_bytes[gpu] = free_bytes
        insort(self.order, self._key(gpu))

    @abstractmethod
    def _key(self, gpu: int) -> tuple[int, int]:
        """Return the sort key of a GPU, which ends with its index."""


class MostFree(_Sorted):
    """Chooses the GPUs with the most free memory; of equals the first."""

    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """Return the first in order, if the last of them has enough."""
        if count > len(self.order) or -self.order[count - 1][0] < need_bytes:
            return None
        return tuple(gpu for _, gpu in self.order[:count])

    def _key(self, gpu: int) -> tuple[int, int]:
        return -self.free_bytes[gpu], gpu


class BestFit(_Sorted):
    """Chooses the GPUs with the least free memory that is enough; of equals the first."""

    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """Return the GPUs that follow the need in order."""
        start = bisect_left(self.order, (need_bytes, 0))
        chosen = self.order[start : start + count]
        return tuple(gpu for _, gpu in chosen) if len(chosen) == count else None

    def _key(self, gpu: int) -> tuple[int, int]:
        return self.free_bytes[gpu], gpu


class FirstFit(FreeMemory):
    """Chooses the first GPUs with enough, by a tree whose nodes have the most free bytes below them."""

    def __init__(self, gpus: int, free_bytes: int) -> None:
        super().__init__(gpus, free_bytes)
        self.leaves = 1 << (gpus - 1).bit_length()
        self.most = [CLOSED] * (2 * self.leaves)  # node i has the children 2i and 2i + 1; leaves come last
        self.most[self.leaves : self.leaves + gpus] = self.free_bytes
        for node in range(self.leaves - 1, 0, -1):
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])

    def set(self, gpu: int, free_bytes: int) -> None:
        """Set the free bytes of a GPU, and update the nodes above it."""
        self.free_bytes[gpu] = free_bytes
        node = self.leaves + gpu
        self.most[node] = free_bytes
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])

    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """Search from left to right, below nodes that have enough."""
        chosen: list[int] = []
        nodes = [1]
        while nodes and len(chosen) < count:
            node = nodes.pop()
            if self.most[node] < need_bytes:
                continue
            if node >= self.leaves:
                chosen.append(node - self.leaves)
            else:
                nodes += (2 * node + 1, 2 * node)  # the left one is searched first
        return tuple(chosen) if len(chosen) == count else None


def free_memory(policy: str, gpus: int, free_bytes: int) -> FreeMemory:
    """Return the index for a policy; exclusive use takes the first idle GPUs."""
    kinds: dict[str, type[FreeMemory]] = {BEST_FIT: BestFit, MOST_FREE: MostFree}
    return kinds.get(policy, FirstFit)(gpus, free_bytes)
