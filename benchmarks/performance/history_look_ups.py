"""Look-ups of the history at a million jobs: `python -m benchmarks.performance history_look_ups`.

Each look-up goes through the service's own code with an empty cache, one after the other, as a first request does.
"""

import asyncio
import hashlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text

from benchmarks.clusters import postgresql
from vramcast.collocation.service.history import History
from vramcast.collocation.service.settings import Limits
from vramcast.collocation.service.storage import Storage

JOBS, LOOK_UPS = 1_000_000, 20_000
LIMITS = Limits(cached_history_jobs=1, look_up_seconds=10)


def key_of(number: int) -> bytes:
    return hashlib.md5(str(number).encode(), usedforsecurity=False).digest()


def fill(place: str | Path) -> None:
    """Store a million jobs."""
    storage = Storage(place, 2 * JOBS)
    with storage.writing() as connection:
        if storage.is_shared:
            rows = "SELECT decode(md5(i::text), 'hex'), 1, 1000000000, i FROM generate_series(0, :most - 1) AS i"
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text(f"INSERT INTO observed {rows}"), {"most": JOBS})
        else:
            statement = text("INSERT INTO observed VALUES (:job, 1, 1000000000, :now)")
            for start in range(0, JOBS, 10_000):
                rows_of_part = [{"job": key_of(number), "now": number} for number in range(start, start + 10_000)]
                connection.execute(statement, rows_of_part)
    storage.close()


async def look_up(place: str | Path) -> list[float]:
    """Return the seconds of each look-up of a random job."""
    history, draw, seconds = History(place, LIMITS), random.Random(0), []
    for _ in range(LOOK_UPS):
        key = key_of(draw.randrange(JOBS))
        start = time.perf_counter()
        peak = await history.get(key)
        seconds.append(time.perf_counter() - start)
        if peak is None:
            raise RuntimeError("expected the job in the database, found none")
    await history.close()
    return sorted(seconds)


def rows(folder: Path) -> Iterator[str]:
    """Yield a row of the table for each database."""

    def row(name: str, place: str | Path) -> str:
        fill(place)
        seconds = asyncio.run(look_up(place))
        p50, p99 = (1000 * seconds[int(share * len(seconds))] for share in (0.5, 0.99))
        return f"| {name} | {p50:.2f} ms | {p99:.2f} ms |"

    yield row("SQLite", folder / "history.db")
    if reason := postgresql.missing():
        print(f"PostgreSQL is skipped: {reason}")
        return
    (folder / "server").mkdir()
    folder.chmod(0o755)
    with postgresql.postgresql(folder / "server") as server:
        yield row("PostgreSQL, on loopback", server.url)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="vramcast-history-"))
    try:
        table = list(rows(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"| {LOOK_UPS:,} look-ups among {JOBS:,} jobs | p50 | p99 |\n| --- | --- | --- |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
