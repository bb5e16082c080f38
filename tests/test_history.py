"""The history in memory and in its file: they agree after restarts, cancelled requests and silent disks."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from history_files import A, B, C, read_lines, read_peaks, write_runs

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service import history_file
from vramcast.collocation.service.history import History
from vramcast.collocation.service.history_file import NotStoredError
from vramcast.collocation.service.settings import Limits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def peaks_in_memory(history: History) -> dict[bytes, ObservedPeak]:
    return dict(history._peaks)


def test_a_job_in_memory_keeps_its_peak_if_the_file_lost_it(path: Path) -> None:
    async def scenario() -> None:
        history = History(path, Limits(history_jobs=2))
        await history.observe(A, 10000)
        await history.observe(B, 1)
        history.get(A)
        await history.observe(C, 1)
        history.get(A)
        assert await history.observe(A, 5) == ObservedPeak(2, 10000)
        await history.close()

    asyncio.run(scenario())
    assert read_peaks(path, 2) == {C: ObservedPeak(1, 1), A: ObservedPeak(2, 10000)}


@pytest.mark.parametrize("seed", range(10))
def test_a_restart_changes_no_peak(path: Path, seed: int) -> None:
    """Which jobs are left may differ, since what was asked for is not written; what is known of them may not."""
    draw, keys = random.Random(seed), [bytes([index]) * 16 for index in range(8)]

    async def scenario() -> None:
        for _ in range(5):
            history, last = History(path, Limits(history_jobs=3)), None
            for _ in range(draw.randrange(40)):
                key, act = draw.choice(keys), draw.random()
                if act < 0.5:
                    before = history.get(key)
                    assert await history.observe(key, peak := draw.randrange(1, 100)) == ObservedPeak(1, peak).joined(
                        before
                    )
                    last = key
                elif act < 0.9:
                    history.get(key)
                else:
                    await history.forget(key)
                    last = None if key == last else last
                    assert history.get(key) is None
            await history.close()
            stored, in_memory = read_peaks(path, 3), peaks_in_memory(history)
            assert last is None or last in stored
            assert {key: stored[key] for key in stored.keys() & in_memory.keys()} == {
                key: in_memory[key] for key in stored.keys() & in_memory.keys()
            }

    asyncio.run(scenario())


def test_the_file_is_shortened_to_the_jobs_in_memory(path: Path) -> None:
    async def scenario() -> None:
        history = History(path, Limits(history_jobs=2))
        await history.observe(A, 9)
        for index in range(20):
            history.get(A)
            await history.observe(bytes([index]) * 16, 1)
            assert len(read_lines(path)) <= 2 + 2 * history_file._SPARE
        await history.close()
        assert any(line.get("job") == A.hex() for line in read_lines(path)), "asked for all the time"

    asyncio.run(scenario())


class Disk:
    """Syncs wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        sync = os.fsync

        def waiting(fd: int) -> None:
            self.answers.wait(30)
            sync(fd)

        monkeypatch.setattr(history_file.os, "fsync", waiting)


SHORT = Limits(store_seconds=0.2)


def test_a_silent_disk_is_an_error_and_its_late_writes_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        history = History(path, SHORT)
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
        assert peaks_in_memory(history) == {}, "nothing is known before it is on the disk"
        disk.answers.set()
        while not history.get(A):
            await asyncio.sleep(0.01)
        assert await history.observe(C, 9) == ObservedPeak(1, 9)
        assert peaks_in_memory(history) == {A: ObservedPeak(1, 5), C: ObservedPeak(1, 9)}, (
            "the client of B had given up"
        )
        await history.close()
        assert read_peaks(path) == peaks_in_memory(history)

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


def test_a_process_ends_although_its_disk_does_not_answer(path: Path) -> None:
    code = f"""
import asyncio, os, time
from pathlib import Path
from vramcast.collocation.service.history_file import NotStoredError
from vramcast.collocation.service.history import History
from vramcast.collocation.service.settings import Limits

async def main():
    history = History(Path({str(path)!r}), Limits(store_seconds=0.2))
    os.fsync = lambda fd: time.sleep(600)
    try:
        await history.observe(b"a" * 16, 5)
    except NotStoredError as error:
        print(error)
    await history.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not answer" in done.stdout
    write_runs(path, (B, 1))  # and the kernel freed the lock
