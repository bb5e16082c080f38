"""The history in memory and in SQLite: they agree after restarts, kills, cancelled requests and silent disks."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from history_files import HEADER, WRITER, A, B, C, acknowledged_before_a_kill, line, read_peaks
from sqlalchemy import text

from vramcast.collocation.observed_peak import ObservedPeak, reservation_bytes
from vramcast.collocation.service import database
from vramcast.collocation.service.history import History, NotStoredError
from vramcast.collocation.service.old_history import import_history
from vramcast.collocation.service.settings import Limits
from vramcast.collocation.service.storage import Change, Changed, Storage
from vramcast.errors import UserError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


def test_the_margin_is_on_top_of_the_peak() -> None:
    assert reservation_bytes(1000) == 1050
    assert reservation_bytes(1) == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_restart_changes_no_peak(path: Path, seed: int) -> None:
    draw, keys = random.Random(seed), [bytes([index]) * 16 for index in range(8)]
    expected: dict[bytes, ObservedPeak] = {}

    async def scenario() -> None:
        for _ in range(3):
            history = History(path, Limits(cached_history_jobs=3))
            for _ in range(draw.randrange(40)):
                key, act = draw.choice(keys), draw.random()
                if act < 0.5:
                    peak_bytes = draw.randrange(1, 100)
                    expected[key] = ObservedPeak(1, peak_bytes).joined(expected.get(key))
                    assert await history.observe(key, peak_bytes) == expected[key]
                elif act < 0.9:
                    assert await history.get(key) == expected.get(key)
                else:
                    await history.forget(key)
                    expected.pop(key, None)
                    assert await history.get(key) is None
            await history.close()
            assert read_peaks(path) == expected

    asyncio.run(scenario())


def test_the_number_of_jobs_is_bounded(path: Path) -> None:
    async def scenario() -> None:
        history = History(path, Limits(history_jobs=5, cached_history_jobs=2))
        for index in range(50):
            await history.observe(bytes([index]) * 16, 1)
        assert len(history) == 5
        assert len(history._cache) == 2
        await history.close()
        assert sorted(key[0] for key in read_peaks(path)) == [45, 46, 47, 48, 49]

    asyncio.run(scenario())


class Disk:
    """Changes wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        change = Storage.change

        def waiting(storage: Storage, changes: Sequence[Change]) -> Changed:
            self.answers.wait(30)
            return change(storage, changes)

        monkeypatch.setattr(Storage, "change", waiting)


def test_a_silent_disk_is_an_error_and_its_late_writes_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        history = History(path, Limits(store_seconds=0.2))
        disk = Disk(monkeypatch)
        first = asyncio.create_task(history.observe(A, 5))
        await asyncio.sleep(0.1)
        behind = asyncio.create_task(history.observe(B, 7))
        with pytest.raises(NotStoredError, match=r"does not answer for 0\.2 s"):
            await first
        start = time.perf_counter()
        with pytest.raises(NotStoredError, match="still writing an earlier one"):
            await history.observe(C, 9)
        assert time.perf_counter() - start < 0.05, "at once"
        with pytest.raises(NotStoredError):
            await behind
        assert await history.get(A) is None, "nothing is known before it is on the disk"
        disk.answers.set()
        while not await history.get(A):
            await asyncio.sleep(0.01)
        assert await history.observe(C, 9) == ObservedPeak(1, 9)
        await history.close()
        assert read_peaks(path) == {A: ObservedPeak(1, 5), C: ObservedPeak(1, 9)}, "the client of B had given up"

    asyncio.run(scenario())


def test_a_cancelled_observation_does_not_make_memory_and_file_differ(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        history = History(path, Limits())
        disk = Disk(monkeypatch)
        task = asyncio.create_task(history.observe(A, 5))
        await asyncio.sleep(0.05)
        task.cancel()
        disk.answers.set()
        assert await history.observe(A, 3) == ObservedPeak(2, 5)
        await history.close()

    asyncio.run(scenario())
    assert read_peaks(path) == {A: ObservedPeak(2, 5)}


def test_closing_waits_for_the_current_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        history = History(path, Limits())
        disk = Disk(monkeypatch)
        task = asyncio.create_task(history.observe(A, 5))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(history.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        disk.answers.set()
        await closing
        assert await task == ObservedPeak(1, 5)
        assert read_peaks(path) == {A: ObservedPeak(1, 5)}, "and another may have it"

    asyncio.run(scenario())


SILENT = """
async def main():
    history = History(Path(sys.argv[1]), Limits(store_seconds=0.2))
    Storage.change = lambda *_: time.sleep(600)
    try:
        await history.observe(b"a" * 16, 5)
    except NotStoredError as error:
        print(error)
    await history.close()

asyncio.run(main())
"""


def test_a_kill_loses_no_acknowledged_observation(path: Path) -> None:
    acknowledged = acknowledged_before_a_kill(str(path), 300)
    stored = read_peaks(path)
    assert {key: stored[key].peak_bytes for key in acknowledged} == acknowledged


def test_a_process_ends_although_its_disk_does_not_answer(path: Path) -> None:
    command = [sys.executable, "-c", WRITER.format(SILENT), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not answer" in done.stdout
    assert read_peaks(path) == {}, "and the kernel freed the lock"


# --- versions --------------------------------------------------------------------------------------------------------


def test_a_later_version_is_refused_and_not_changed(path: Path) -> None:
    storage = Storage(path, 10)
    with storage.writing() as connection:
        connection.execute(text("INSERT INTO schema_version VALUES (7)"))
    storage.close()
    with pytest.raises(UserError, match=r"found version 7: install a newer vramcast"):
        Storage(path, 10)


def test_a_database_of_an_earlier_version_is_migrated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(path, 10)
    storage.change([Change(A, 5)])
    storage.close()
    column = ("ALTER TABLE observed ADD COLUMN note TEXT",)
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, column))
    for _ in range(2):
        storage = Storage(path, 10)
        with storage.reading() as connection:
            assert connection.execute(text("SELECT note FROM observed")).all() == [(None,)]
            assert connection.execute(text("SELECT version FROM schema_version")).all() == [(1,), (2,)]
        storage.close()


def test_a_file_of_an_earlier_version_is_imported_once(path: Path, tmp_path: Path) -> None:
    old = tmp_path / "history.jsonl"
    known = [line(A, 1, 5), line(B, 2, 7), line(A, 3, 9), line(C, 1, 1), line(C)]
    old.write_bytes(HEADER + b"".join(known) + b'{"torn')
    for _ in range(2):
        storage = Storage(path, 10)
        import_history(old, storage)
        storage.close()
        assert read_peaks(path) == {A: ObservedPeak(3, 9), B: ObservedPeak(2, 7)}
    storage = Storage(path, 10)
    assert storage.change([Change(A, 20)]).after == [ObservedPeak(4, 20)]
    storage.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"something else\n", "another kind of file"),
        (b"", "another kind of file"),
        (HEADER + line(A, -1, 5), "runs of -1"),
        (HEADER + line(A[:4], 1, 5), "4 bytes"),
    ],
)
def test_another_file_is_not_imported(path: Path, tmp_path: Path, content: bytes, words: str) -> None:
    old = tmp_path / "history.jsonl"
    old.write_bytes(content)
    storage = Storage(path, 10)
    with pytest.raises(UserError, match=words):
        import_history(old, storage)
    storage.close()
    assert read_peaks(path) == {}


def test_damaged_lines_are_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, storage = tmp_path / "history.jsonl", Storage(None, 10)
    old.write_bytes(HEADER + line(A, 1, 5).replace(b"5", b"6") + line(B, 1, 7))
    import_history(old, storage)
    assert storage.peaks([A, B]) == {B: ObservedPeak(1, 7)}
    assert "left out" in caplog.text


@pytest.mark.parametrize("place", ["mysql://x/y", "postgresql://h:port/d", "postgresql+asyncpg://x/y"])
def test_another_url_is_refused_in_one_sentence(place: str) -> None:
    with pytest.raises(UserError, match=r"expected .*postgresql://.*found"):
        Storage(place, 10)


def test_look_ups_are_cached_until_a_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    peaks = Storage.peaks

    def counted(storage: Storage, keys: Sequence[bytes]) -> Any:
        asked.append(keys)
        return peaks(storage, keys)

    async def scenario() -> None:
        history = History(path, Limits())
        monkeypatch.setattr(Storage, "peaks", counted)
        assert [await history.get(A) for _ in range(3)] == [None] * 3
        assert len(asked) == 1
        await history.observe(A, 5)
        assert await history.get(A) == ObservedPeak(1, 5)
        assert len(asked) == 1
        await history.close()

    asyncio.run(scenario())
