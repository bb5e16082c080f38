"""Placements by two replicas that share a PostgreSQL: no GPU may be booked twice."""

import json
import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.clusters import postgresql
from benchmarks.soak.running_service import RunningService, running_service

_THREADS = 8
_ROUND = 500
"""Placements at a time: they end long before the first of their approvals does."""
_NODES, _GPUS, _FREE_MIB, _TOTAL_MIB = 30, 4, 39_000, 40_960
_LEAST_MIB, _MOST_MIB = 4_000, 20_000


def placed(directory: Path, placements: int) -> tuple[dict[str, int], list[str]]:
    """Place pods as concurrent schedulers do, each call at either replica. Return counts, and GPUs booked twice."""
    if reason := postgresql.missing():
        print(f"placements by replicas are skipped: {reason}", flush=True)
        return {}, []
    folder = Path(tempfile.mkdtemp(prefix="vramcast-postgresql-"))
    counts, faults = {"placed": 0, "nowhere": 0}, []
    try:
        with ExitStack() as stack:
            server = stack.enter_context(postgresql.postgresql(folder))
            services = [stack.enter_context(_replica(directory, server.url, number)) for number in range(2)]
            for start in range(0, placements, _ROUND):
                numbers = range(start, min(start + _ROUND, placements))
                with ThreadPoolExecutor(_THREADS) as threads:
                    for is_placed in threads.map(lambda number: _place(services, number), numbers):
                        counts["placed" if is_placed else "nowhere"] += 1
                faults += _booked_twice(server.url)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return counts, faults


def _replica(directory: Path, url: str, number: int) -> Any:
    queue = directory / f"replica{number}.queue"
    return running_service(directory / f"replica{number}.log", "--history", url, "--history-queue", str(queue))


def _place(services: list[RunningService], number: int) -> bool:
    """Filter and score the nodes of a pod, as kube-scheduler does. Return False if it fits nowhere."""
    draw = random.Random(number)
    gpus = json.dumps([{"id": str(gpu), "free_mib": _FREE_MIB, "total_mib": _TOTAL_MIB} for gpu in range(_GPUS)])
    nodes = [
        {"metadata": {"name": f"n{index}", "annotations": {"vramcast/gpus": gpus}}}
        for index in draw.sample(range(_NODES), 5)
    ]
    notes = {"vramcast/need-mib": str(draw.randrange(_LEAST_MIB, _MOST_MIB)), "vramcast/gpu-count": "1"}
    pod = {"metadata": {"name": f"pod{number}", "uid": f"pod{number}", "annotations": notes}}
    _, reply = draw.choice(services).post("/k8s/filter", {"Pod": pod, "Nodes": {"items": nodes}})
    fitting = reply["Nodes"]["items"]
    if len(fitting) > 1:
        draw.choice(services).post("/k8s/prioritize", {"Pod": pod, "Nodes": {"items": fitting}})
    return bool(fitting)


def _booked_twice(url: str) -> list[str]:
    """Return the GPUs whose approvals exceed their free memory, and remove all approvals for the next round."""
    query = "SELECT node, gpu, SUM(need_mib) FROM approved GROUP BY node, gpu HAVING SUM(need_mib) > %s"
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(query, (_FREE_MIB,)).fetchall()
        (booked,) = connection.execute("SELECT COUNT(*) FROM approved").fetchone() or (0,)
        connection.execute("DELETE FROM approved")
    faults = [f"GPU {gpu} of {node} is booked for {mib:.0f} of {_FREE_MIB} MiB" for node, gpu, mib in rows]
    return faults if booked else [*faults, "no placement was booked"]
