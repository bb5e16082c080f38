"""The GPUs that pods were approved for, until their memory is seen in use. Replicas share them in the database."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import Connection, bindparam, text

from vramcast.collocation.adapters.kubernetes import GpusByNode
from vramcast.collocation.placement import GpuState, Need, Placement, rank
from vramcast.collocation.service.database import StorageDownError
from vramcast.collocation.service.storage_access import StorageAccess

_MOST_ROWS = 20_000
"""The oldest are dropped, now and then."""
_ENDED_SECONDS = 600.0
"""How long ended approvals stay: replicas that delete the same rows at the same time could wait for each other."""
_CLEANED_AFTER = 100
_MOST_NAMES = 500
"""Nodes that are named in a question; for more, all approvals are read."""
_ANSWER_SECONDS = 1.0
"""Time for the database. kube-scheduler waits only 200 ms, but an approval that comes late counts for the next pods."""

_OF_ALL = "SELECT pod, node, gpu, need_mib, free_mib FROM approved WHERE until > :now AND pod <> :pod"
_ALL = text(f"{_OF_ALL} ORDER BY id")
_OF_NODES = text(f"{_OF_ALL} AND node IN :nodes ORDER BY id").bindparams(bindparam("nodes", expanding=True))
_INSERT = text(
    "INSERT INTO approved (pod, node, gpu, need_mib, free_mib, until)"
    " VALUES (:pod, :node, :gpu, :need_mib, :free_mib, :until)"
)
_OLD = text("DELETE FROM approved WHERE until <= :ended OR id <= (SELECT MAX(id) FROM approved) - :most")

_Taken = Mapping[tuple[str, str], Sequence[tuple[float, float]]]
"""The approvals by node and GPU: the need of each, and the free memory of the GPU as its node stated it then."""


class Approvals:
    """Approvals of pods for GPUs. Their needs are subtracted from the free memory that was stated before them.

    kube-scheduler does not say where it binds a pod: the approved node is that with the highest score, or the only one.
    Once a pod uses its memory, its node states less free memory, and nothing more is subtracted. An approval ends after
    `seconds`, or with the pod's next one. Without a database that answers nothing is subtracted.
    """

    def __init__(
        self,
        access: StorageAccess,
        policy: str,
        seconds: float = 120.0,
        clock: Callable[[], float] = time.time,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self._access = access
        self._policy = policy
        self._seconds = seconds
        self._clock = clock
        self._answer_seconds = answer_seconds
        self._approved = 0

    async def subtracted(self, pod: str, stated: GpusByNode) -> GpusByNode:
        """Return the GPUs of each node without the memory that other pods were approved for."""
        try:
            return await self._access.call(lambda: self._subtracted(pod, stated), self._answer_seconds)
        except StorageDownError:
            return stated

    async def approve(self, pod: str, need: Need, count: int, node: str, gpus: Sequence[GpuState]) -> bool:
        """Approve a pod for the best GPUs of a node, in place of its earlier approval. Return False without room."""
        try:
            return await self._access.call(lambda: self._approve(pod, need, count, node, gpus), self._answer_seconds)
        except StorageDownError:
            return True

    def _subtracted(self, pod: str, stated: GpusByNode) -> GpusByNode:
        storage = self._access.storage
        storage.prepare()
        with storage.reading() as connection:
            taken = self._taken(connection, pod, [name for name, gpus in stated.items() if gpus])
        return {name: gpus and _without(gpus, name, taken) for name, gpus in stated.items()}

    def _taken(self, connection: Connection, pod: str, nodes: Sequence[str]) -> _Taken:
        values = {"now": self._clock(), "pod": pod}
        few = len(nodes) <= _MOST_NAMES
        rows = connection.execute(_OF_NODES if few else _ALL, values | ({"nodes": list(nodes)} if few else {}))
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            taken.setdefault((row.node, row.gpu), []).append((row.need_mib, row.free_mib))
        return taken

    def _approve(self, pod: str, need: Need, count: int, node: str, gpus: Sequence[GpuState]) -> bool:
        storage, now = self._access.storage, self._clock()
        with storage.writing() as connection:
            if storage.is_shared:  # one replica at a time decides about a node; a file has one writer
                connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:node))"), {"node": node})
            placements = rank(need, _without(gpus, node, self._taken(connection, pod, [node])), self._policy)[:count]
            if len(placements) < count:
                return False
            connection.execute(text("DELETE FROM approved WHERE pod = :pod"), {"pod": pod})
            connection.execute(_INSERT, [self._row(pod, node, item, gpus, now) for item in placements])
            self._approved += 1
            if self._approved % _CLEANED_AFTER == 0:
                connection.execute(_OLD, {"ended": now - _ENDED_SECONDS, "most": _MOST_ROWS})
        return True

    def _row(
        self, pod: str, node: str, placement: Placement, gpus: Sequence[GpuState], now: float
    ) -> dict[str, str | float]:
        stated = next(gpu for gpu in gpus if gpu.id == placement.gpu.id)
        return {
            "pod": pod,
            "node": node,
            "gpu": stated.id,
            "need_mib": placement.need_mib,
            "free_mib": stated.free_mib,
            "until": now + self._seconds,
        }


def _without(gpus: Sequence[GpuState], node: str, taken: _Taken) -> list[GpuState]:
    return [replace(gpu, free_mib=_free_mib(gpu, taken.get((node, gpu.id), ()))) for gpu in gpus]


def _free_mib(gpu: GpuState, others: Sequence[tuple[float, float]]) -> float:
    """Return the free memory that is left: as stated, unless approved pods do not use theirs yet."""
    if not others:
        return gpu.free_mib
    expected_mib = others[0][1] - sum(need_mib for need_mib, _ in others)
    return max(0.0, min(gpu.free_mib, expected_mib))
