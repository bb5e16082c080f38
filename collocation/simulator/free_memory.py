"""Which GPUs a job is put on: what is free on each, indexed so that no choice looks at all of them.

The policies are those of `collocation.placement`, which looks through a list of GPUs; here that would be too slow.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort

from vramcast.collocation.simulator.rules import BEST_FIT, MOST_FREE

CLOSED = -1
"""Free bytes of a GPU that takes no job at all."""


class FreeMemory(ABC):
    """Free bytes by GPU, and the choice of GPUs that have enough."""

    def __init__(self, gpus: int, free_bytes: int) -> None:
        self.free_bytes = [free_bytes] * gpus

    @abstractmethod
    def set(self, gpu: int, free_bytes: int) -> None:
        """Note what is free on a GPU now."""

    @abstractmethod
    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """So many GPUs with that much free each, the preferred one first; None where there are too few."""


class _Sorted(FreeMemory):
    """GPUs in order of free memory. Insertion moves pointers alone: thousands of GPUs are no matter."""

    def __init__(self, gpus: int, free_bytes: int) -> None:
        super().__init__(gpus, free_bytes)
        self.order = sorted(self._key(gpu) for gpu in range(gpus))

    def set(self, gpu: int, free_bytes: int) -> None:
        """Note what is free on a GPU now."""
        del self.order[bisect_left(self.order, self._key(gpu))]
        self.free_bytes[gpu] = free_bytes
        insort(self.order, self._key(gpu))

    @abstractmethod
    def _key(self, gpu: int) -> tuple[int, int]:
        """What sorts a GPU to its place; the second number names it."""


class MostFree(_Sorted):
    """The GPUs with the most free memory; of equals the first."""

    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """The first in order, if the last of them has enough."""
        if count > len(self.order) or -self.order[count - 1][0] < need_bytes:
            return None
        return tuple(gpu for _, gpu in self.order[:count])

    def _key(self, gpu: int) -> tuple[int, int]:
        return -self.free_bytes[gpu], gpu


class BestFit(_Sorted):
    """The GPUs with the least free memory that is enough; of equals the first."""

    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """Those that follow the need in order."""
        start = bisect_left(self.order, (need_bytes, 0))
        found = self.order[start : start + count]
        return tuple(gpu for _, gpu in found) if len(found) == count else None

    def _key(self, gpu: int) -> tuple[int, int]:
        return self.free_bytes[gpu], gpu


class FirstFit(FreeMemory):
    """The first GPUs with enough, found in a tree in which each node knows the most that is free below it."""

    def __init__(self, gpus: int, free_bytes: int) -> None:
        super().__init__(gpus, free_bytes)
        self.leaves = 1 << (gpus - 1).bit_length()
        self.most = [CLOSED] * (2 * self.leaves)  # node i has the children 2i and 2i + 1; leaves come last
        self.most[self.leaves : self.leaves + gpus] = self.free_bytes
        for node in range(self.leaves - 1, 0, -1):
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])

    def set(self, gpu: int, free_bytes: int) -> None:
        """Tell the nodes above the GPU."""
        self.free_bytes[gpu] = free_bytes
        node = self.leaves + gpu
        self.most[node] = free_bytes
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])

    def choose(self, need_bytes: int, count: int) -> tuple[int, ...] | None:
        """From left to right, only below nodes that have enough."""
        found: list[int] = []
        nodes = [1]
        while nodes and len(found) < count:
            node = nodes.pop()
            if self.most[node] < need_bytes:
                continue
            if node >= self.leaves:
                found.append(node - self.leaves)
            else:
                nodes += (2 * node + 1, 2 * node)  # the left one is looked at first
        return tuple(found) if len(found) == count else None


def free_memory(policy: str, gpus: int, free_bytes: int) -> FreeMemory:
    """The index for a policy; exclusive use takes the first idle GPUs."""
    kinds: dict[str, type[FreeMemory]] = {BEST_FIT: BestFit, MOST_FREE: MostFree}
    return kinds.get(policy, FirstFit)(gpus, free_bytes)
