"""Replicas that share a PostgreSQL: they agree, lose nothing when it is down, and book no GPU twice."""

import asyncio
import random
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from history_files import HEADER, A, B, C, acknowledged_before_a_kill, line, read_peaks
from observations import JOB, classify, observe
from served import Service, serving
from sqlalchemy import text

from benchmarks.clusters import postgresql
from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.placement import GpuState
from vramcast.collocation.service import history as history_module
from vramcast.collocation.service.approvals import Approvals
from vramcast.collocation.service.history import History, NotStoredError
from vramcast.collocation.service.old_history import import_history
from vramcast.collocation.service.settings import Limits, Settings
from vramcast.collocation.service.storage import Storage

pytestmark = pytest.mark.skipif(postgresql.missing() is not None, reason=str(postgresql.missing()))
SOON = Limits(store_seconds=1.0, look_up_seconds=0.3, waiting_observations=60)


@pytest.fixture(scope="module")
def running() -> Iterator[postgresql.Server]:
    folder = Path(tempfile.mkdtemp(prefix="vramcast-postgresql-"))  # not in tmp_path, which only root can enter
    try:
        with postgresql.postgresql(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server(running: postgresql.Server) -> postgresql.Server:
    running.clear()
    return running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "_DRAIN_SECONDS", 0.05)


class Replicas:
    """Two histories of one database, each with a queue of its own."""

    def __init__(self, url: str, folder: Path, limits: Limits = SOON) -> None:
        self.both = [History(url, limits, folder / f"{number}.queue") for number in range(2)]
        for item in self.both:
            item.access.breaker._seconds = 0.1

    async def __aenter__(self) -> list[History]:
        await asyncio.gather(*(item.start() for item in self.both))
        for item in self.both:
            await until(lambda item=item: item._is_cache_sound)  # type: ignore[misc]
        return self.both

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.gather(*(item.close() for item in self.both))


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def becomes(read: Callable[[], Awaitable[Any]], expected: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while await read() != expected:
            await asyncio.sleep(0.005)


def test_replicas_agree_about_cached_jobs(server: postgresql.Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Replicas(server.url, tmp_path) as (one, other):
            assert await other.get(A) is None
            assert A in other._cache
            await one.observe(A, 5)
            await becomes(lambda: other.get(A), ObservedPeak(1, 5))
            await asyncio.gather(*(item.observe(A, peak) for item in (one, other) for peak in range(50)))
            for item in (one, other):
                await becomes(lambda item=item: item.get(A), ObservedPeak(101, 49))  # type: ignore[misc]
            await other.forget(A)
            await becomes(lambda: one.get(A), None)

    asyncio.run(scenario())


def test_two_services_answer_alike(server: postgresql.Server, tmp_path: Path) -> None:
    def settings(number: int) -> Settings:
        return Settings(history=server.url, history_queue=tmp_path / f"{number}.queue")

    async def scenario() -> None:
        async with serving(settings(0)) as one, serving(settings(1)) as other:
            forecast = await classify(other, JOB)
            assert forecast["basis"] == "forecast"
            await observe(one, JOB, 900)

            async def basis(service: Service) -> Any:
                return (await classify(service, JOB))["observed"]

            for service in (one, other):
                await becomes(lambda service=service: basis(service), {"runs": 1, "peak_mib": 900})  # type: ignore[misc]

    asyncio.run(scenario())


def test_a_database_that_is_down_costs_no_answer_and_no_observation(server: postgresql.Server, tmp_path: Path) -> None:
    settings = Settings(history=server.url, history_queue=tmp_path / "queue", limits=SOON)

    async def scenario() -> None:
        async with serving(settings) as service:
            service.engine.history.access.breaker._seconds = 0.1
            await observe(service, JOB, 900)
            assert "vramcast-history" not in (await service.post("/v1/classify", JOB)).headers
            server.signal(signal.SIGKILL)
            await until(lambda: not service.engine.history._is_cache_sound)
            for _ in range(2):
                response = await service.post("/v1/classify", JOB)
                assert response.json["basis"] == "forecast"
                assert response.headers["vramcast-history"] == "unavailable"
            response = await service.post("/v1/observations", {"job": JOB, "device": "t4", "peak_mib": 950})
            assert (response.status, response.headers["vramcast-history"]) == (200, "unavailable")
            assert "vramcast_observations_waiting 1.0" in (await service.get("/metrics")).body.decode()
        server.start()
        async with serving(replace(settings, limits=Limits())) as service:  # what waited survives a restart
            await until(lambda: service.engine.history.waiting == 0)

            async def observed() -> Any:
                return (await classify(service, JOB))["observed"]

            await becomes(observed, {"runs": 2, "peak_mib": 950})

    asyncio.run(scenario())


def test_a_database_that_hangs_is_like_one_that_is_down(server: postgresql.Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Replicas(server.url, tmp_path) as (one, _):
            await one.observe(A, 5)
            one._is_cache_sound = False  # or the answer comes from memory
            server.signal(signal.SIGSTOP)
            try:
                assert await one.get(A) is None
                assert await one.observe(B, 7) == ObservedPeak(1, 7)
                assert one.waiting == 1
            finally:
                server.signal(signal.SIGCONT)
            await until(lambda: one.waiting == 0)
            await becomes(lambda: one.get(A), ObservedPeak(1, 5))

    asyncio.run(scenario())
    assert read_peaks(server.url)[B].peak_bytes == 7


def test_the_queue_is_bounded_and_in_order(server: postgresql.Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Replicas(server.url, tmp_path) as (one, _):
            server.signal(signal.SIGKILL)
            await one.observe(A, 5)
            await one.forget(A)
            for index in range(58):
                await one.observe(C, index + 1)
            with pytest.raises(NotStoredError, match="too many that wait"):
                await one.observe(C, 100)
            server.start()
            await until(lambda: one.waiting == 0)

    asyncio.run(scenario())
    assert read_peaks(server.url) == {C: ObservedPeak(58, 58)}


def test_kills_of_the_database_under_load_lose_no_acknowledged_observation(
    server: postgresql.Server, tmp_path: Path
) -> None:
    acknowledged: dict[bytes, int] = {}
    draw = random.Random(1)

    async def load(history: History, worker: int, end: asyncio.Event) -> None:
        while not end.is_set():
            key, peak = b"%16d" % draw.randrange(8 * worker, 8 * worker + 8), draw.randrange(1, 10**6)
            await history.observe(key, peak)
            acknowledged[key] = max(peak, acknowledged.get(key, 0))

    async def scenario() -> None:
        end = asyncio.Event()
        async with Replicas(server.url, tmp_path, Limits(store_seconds=2.0)) as both:
            loads = [asyncio.create_task(load(both[number % 2], number, end)) for number in range(8)]
            for _ in range(2):
                await asyncio.sleep(draw.uniform(0.1, 0.3))
                server.signal(signal.SIGKILL)
                await asyncio.sleep(0.1)
                await asyncio.to_thread(server.start)
            await asyncio.sleep(0.2)
            end.set()
            await asyncio.gather(*loads)
            for item in both:
                await until(lambda item=item: item.waiting == 0)  # type: ignore[misc]

    asyncio.run(scenario())
    assert len(acknowledged) == 64
    stored = read_peaks(server.url)
    assert {key: stored[key].peak_bytes for key in acknowledged} == acknowledged


def test_a_kill_of_a_replica_loses_no_acknowledged_observation(server: postgresql.Server) -> None:
    acknowledged = acknowledged_before_a_kill(server.url, 300)
    stored = read_peaks(server.url)
    assert {key: stored[key].peak_bytes for key in acknowledged} == acknowledged


def test_replicas_book_no_gpu_twice(server: postgresql.Server, tmp_path: Path) -> None:
    draw = random.Random(2)
    nodes = {f"n{node}": [GpuState(str(gpu), 39_000, 40_960) for gpu in range(4)] for node in range(5)}

    async def place(approvals: Approvals, pod: str, need_mib: float, count: int) -> bool:
        for node in draw.sample(sorted(nodes), len(nodes)):
            if await approvals.approve(pod, need_mib, count, node, nodes[node]):
                return True
        return False

    async def scenario() -> int:
        async with Replicas(server.url, tmp_path, Limits()) as both:
            for item in both:
                item.storage.prepare()
            approvals = [Approvals(item.access, "best-fit", answer_seconds=30) for item in both]
            pods = [(draw.uniform(3_000, 20_000), draw.choice([1, 1, 2])) for _ in range(300)]
            outcomes: list[bool] = []
            for start in range(0, len(pods), 10):
                batch = enumerate(pods[start : start + 10], start)
                outcomes += await asyncio.gather(*(place(approvals[n % 2], f"p{n}", *pod) for n, pod in batch))
            free = await approvals[0].subtracted("another", nodes)
            assert all(gpu.free_mib >= 0 for gpus in free.values() for gpu in gpus or ())
            return sum(outcomes)

    placed = asyncio.run(scenario())
    storage = Storage(server.url, 10)
    with storage.reading() as connection:
        rows = connection.execute(text("SELECT node, gpu, SUM(need_mib) AS mib FROM approved GROUP BY node, gpu")).all()
        pods = connection.execute(text("SELECT COUNT(DISTINCT pod) FROM approved")).scalar_one()
    storage.close()
    assert max(row.mib for row in rows) <= 39_000
    assert min(row.mib for row in rows) > 30_000, "and the GPUs are filled"
    assert len(rows) == 20
    assert pods == placed
    assert 0 < placed < 300


def test_the_file_of_an_earlier_version_is_imported(server: postgresql.Server, tmp_path: Path) -> None:
    old = tmp_path / "history.jsonl"
    old.write_bytes(HEADER + line(A, 2, 5))
    for _ in range(2):  # as each replica does
        storage = Storage(server.url, 10)
        import_history(old, storage)
        storage.close()
    assert read_peaks(server.url) == {A: ObservedPeak(2, 5)}
