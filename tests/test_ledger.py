"""The file of what jobs took: what a crash, a full disk or another program may do to it."""

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from vramcast.collocation.observed_peak import REPEAT_MARGIN, ObservedPeak, reservation_bytes
from vramcast.collocation.service import history_file
from vramcast.collocation.service.history import History
from vramcast.collocation.service.history_file import HistoryFile, NotStoredError
from vramcast.collocation.service.settings import Limits
from vramcast.dataset_builder.store import durable
from vramcast.dataset_builder.store.lines import encode_line
from vramcast.errors import UserError

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def told(path: Path, *seen: tuple[bytes, int], most: int = 100) -> None:
    """One service that is told of some runs, each on its own."""
    ledger = HistoryFile(path, most)
    known = OrderedDict(ledger.found)
    for key, peak_bytes in seen:
        known[key] = ObservedPeak(1, peak_bytes).joined(known.pop(key, None))
        ledger.append([(key, known[key])])
        if ledger.is_long:
            ledger.shorten(list(known.items())[-most:])
    ledger.close()


def found(path: Path, most: int = 100) -> dict[bytes, ObservedPeak]:
    """What the next one knows."""
    ledger = HistoryFile(path, most)
    ledger.close()
    return dict(ledger.found)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def test_the_margin_is_on_top_of_the_peak() -> None:
    assert reservation_bytes(0) == 0
    assert reservation_bytes(1) == 2
    assert reservation_bytes(1000) == 1000 + 1000 * REPEAT_MARGIN


def test_what_was_told_is_found_again_and_the_last_line_of_a_job_counts(path: Path) -> None:
    told(path, (A, 5), (B, 7), (A, 9), (A, 3))
    assert len(lines(path)) == 5, "appended only"
    assert found(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(3, 9)}
    assert [line.get("runs") for line in lines(path)] == [None, 1, 3], "and shorter after a start"
    assert found(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(3, 9)}
    told(path, (C, 1))
    assert list(found(path)) == [B, A, C]


def test_what_is_forgotten_is_not_found_again(path: Path) -> None:
    told(path, (A, 5), (B, 7))
    ledger = HistoryFile(path, 100)
    ledger.append([(A, None), (C, None)])
    ledger.close()
    assert found(path) == {B: ObservedPeak(1, 7)}
    assert b"forgotten" not in path.read_bytes()
    told(path, (A, 1))
    assert found(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(1, 1)}


def test_lines_of_single_runs_add_up_as_they_did(path: Path) -> None:
    told(path, (B, 2))
    for peak_bytes in (9, 5):
        line = encode_line("observed", {"job": A.hex(), "runs": 1, "peak_bytes": peak_bytes})
        path.write_bytes(path.read_bytes() + line)
    told(path, (A, 3))
    assert found(path) == {B: ObservedPeak(1, 2), A: ObservedPeak(3, 9)}


def test_a_line_that_was_cut_short_is_no_line(path: Path) -> None:
    told(path, (A, 5), (B, 7))
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in {*range(0, len(whole), 16), *(end + by for end in ends for by in (-1, 0, 1) if end + by < len(whole))}:
        path.write_bytes(whole[:size])
        kept = found(path)
        assert set(kept) == ({A} if size >= ends[1] else set())
        told(path, (C, 1))
        assert found(path) == {**kept, C: ObservedPeak(1, 1)}, "and what follows is whole"


def test_a_damaged_line_is_left_out_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told(path, (A, 5), (B, 7), (C, 9))
    path.write_bytes(path.read_bytes().replace(b'"peak_bytes":7', b'"peak_bytes":1'))
    assert set(found(path)) == {A, C}
    assert [record.message for record in caplog.records] == ["lines of the history left out"]
    caplog.clear()
    assert set(found(path)) == {A, C}
    assert not caplog.text, "it is gone from there"
    assert b'"peak_bytes":1' in path.with_name("history.jsonl.damaged").read_bytes(), "but not thrown away"


@pytest.mark.parametrize("content", [b"name,mib\nresnet,5\n", b'{"name": "x"}\n', b"\x00" * 400, b"{}"])
def test_a_file_of_others_is_refused_and_stays_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"expected a history .* another kind of file: choose another --history FILE"):
        HistoryFile(path, 100)
    assert path.read_bytes() == content
    path.unlink()
    told(path, (A, 1))  # and the lock was let go


STRANGE = {
    "another type": encode_line("tenant", {"job": A.hex()}),
    "no type": encode_line("known", {"type": None}),
    "no job": encode_line("known", {"runs": 1, "peak_bytes": 1}),
    "another hash": encode_line("known", {"job": "ab", "runs": 1, "peak_bytes": 1}),
    "no hash": encode_line("forgotten", {"job": 7}),
    "no figure": encode_line("known", {"job": A.hex(), "runs": 1}),
    "text": encode_line("known", {"job": A.hex(), "runs": "1", "peak_bytes": 1}),
    "true": encode_line("known", {"job": A.hex(), "runs": True, "peak_bytes": 1}),
    "too much": encode_line("known", {"job": A.hex(), "runs": 1, "peak_bytes": 2**64}),
}


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_a_sound_line_of_another_kind_is_refused_and_stays(path: Path, line: bytes) -> None:
    told(path, (A, 5), (A, 6))
    path.write_bytes(whole := path.read_bytes() + line)
    with pytest.raises(UserError, match=r"expected lines of version 1 .* line 4 is another .*: install a newer"):
        HistoryFile(path, 100)
    assert path.read_bytes() == whole


def test_another_version_is_refused_by_its_name(path: Path) -> None:
    path.write_bytes(whole := encode_line("history", {"version": 7}) + b"whatever\n")
    with pytest.raises(UserError, match=r"expected a history of version 1 .*, found version 7: install a newer"):
        HistoryFile(path, 100)
    assert path.read_bytes() == whole


def test_what_cannot_be_a_file_is_one_sentence(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="--history FILE"):
            HistoryFile(place, 100)


def test_a_second_writer_is_refused_and_the_lock_ends_with_its_holder(path: Path) -> None:
    ledger = HistoryFile(path, 100)
    link = path.with_name("link")
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(UserError, match=rf"another service \(process {os.getpid()} on .* choose another --history"):
            HistoryFile(name, 100)
    ledger.close()
    imports = "import os; from pathlib import Path; from vramcast.collocation.service.history_file import HistoryFile"
    code = f"{imports}; kept = HistoryFile(Path({str(path)!r}), 1); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    told(path, (A, 1))


def test_only_so_many_jobs_are_kept_and_only_so_many_lines(path: Path) -> None:
    for index in range(60):
        told(path, (bytes([index % 5]) * 16, index + 1), most=2)
        assert len(lines(path)) <= 1 + 2 * history_file._SPARE
    assert found(path, 2) == {b"\x03" * 16: ObservedPeak(1, 59), b"\x04" * 16: ObservedPeak(1, 60)}
    assert found(path, 1) == {b"\x04" * 16: ObservedPeak(1, 60)}
    assert len(lines(path)) == 2


def remembered(history: History) -> dict[bytes, ObservedPeak]:
    return dict(history._known)


def test_a_job_that_memory_knows_keeps_its_peak_whatever_the_file_forgot(path: Path) -> None:
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
    assert found(path, 2) == {C: ObservedPeak(1, 1), A: ObservedPeak(2, 10000)}


@pytest.mark.parametrize("seed", range(10))
def test_a_restart_changes_no_figure(path: Path, seed: int) -> None:
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
            again, known = found(path, 3), remembered(history)
            assert last is None or last in again
            assert {key: again[key] for key in again.keys() & known.keys()} == {
                key: known[key] for key in again.keys() & known.keys()
            }

    asyncio.run(scenario())


def test_the_file_is_made_shorter_by_what_memory_knows(path: Path) -> None:
    async def scenario() -> None:
        history = History(path, Limits(history_jobs=2))
        await history.observe(A, 9)
        for index in range(20):
            history.get(A)
            await history.observe(bytes([index]) * 16, 1)
            assert len(lines(path)) <= 2 + 2 * history_file._SPARE
        await history.close()
        assert any(line.get("job") == A.hex() for line in lines(path)), "asked for all the time"

    asyncio.run(scenario())


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_loses_nothing_that_was_stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = HistoryFile(path, 100)
    ledger.append([(A, ObservedPeak(1, 5))])
    whole = path.read_bytes()
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 40:
            full()
        return write(fd, data[: len(data) // 2])

    for name, broken in (("write", half), ("write", full), ("fsync", full)):
        with monkeypatch.context() as patch:
            patch.setattr(history_file.os, name, broken)
            with pytest.raises(NotStoredError, match="No space left"):
                ledger.append([(B, ObservedPeak(1, 7))])
        assert path.read_bytes() == whole
    with monkeypatch.context() as patch:  # nor can what it left be cut off
        patch.setattr(history_file.os, "write", half)
        patch.setattr(history_file.os, "ftruncate", full)
        with pytest.raises(NotStoredError):
            ledger.append([(B, ObservedPeak(1, 7))])
    assert len(path.read_bytes()) > len(whole)
    ledger.append([(C, ObservedPeak(1, 9))])
    ledger.close()
    assert found(path) == {A: ObservedPeak(1, 5), C: ObservedPeak(1, 9)}


def test_without_room_to_make_it_shorter_the_file_stays_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(path, (A, 5), (A, 9))
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert found(path) == {A: ObservedPeak(2, 9)}
        assert path.read_bytes() == whole
        assert [item.name for item in path.parent.iterdir() if "tmp" in item.name] == []
        told(path, (B, 7), *[(A, 1)] * 5, most=2)
    assert found(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(7, 9)}


def test_a_shorter_file_whose_name_is_not_on_the_disk_goes_on_once_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = HistoryFile(path, 100)
    ledger.append([(A, ObservedPeak(1, 5)), (A, ObservedPeak(2, 9))])
    synced, sync = [], durable.sync
    with monkeypatch.context() as patch:  # the new file has its name, but the directory cannot be synced
        patch.setattr(durable, "sync", lambda name: full() if name.is_dir() else sync(name))
        patch.setattr(history_file, "sync", full)
        ledger.shorten([(A, ObservedPeak(2, 9))])
        assert len(lines(path)) == 2
        with pytest.raises(NotStoredError, match="No space left"):
            ledger.append([(B, ObservedPeak(1, 7))])
    monkeypatch.setattr(history_file, "sync", synced.append)
    ledger.append([(B, ObservedPeak(1, 7))])
    ledger.append([(C, ObservedPeak(1, 7))])
    ledger.close()
    assert synced == [path.parent]
    assert set(found(path)) == {A, B, C}


def test_no_handle_is_left_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc here")
    before = handles()
    ledger = HistoryFile(path, 100)
    opened = handles()
    for broken in (False, True):
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(Path, "replace", full)
            ledger.shorten([(A, ObservedPeak(1, 5))])
            assert handles() == opened
    ledger.append([(B, ObservedPeak(1, 7))])
    ledger.close()
    assert handles() == before
    assert set(found(path)) == {A, B}


def test_what_a_dead_process_of_the_same_number_left_is_no_part_of_the_file(path: Path) -> None:
    path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(b"left\n" * 100)
    told(path, (A, 5), (A, 6))
    assert found(path) == found(path) == {A: ObservedPeak(2, 6)}


def test_the_name_of_a_new_file_is_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(history_file, "sync", synced.append)
    HistoryFile(path, 100).close()
    assert synced == [path.parent]


@pytest.mark.parametrize(
    "meddle",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.rename(path.with_name("moved")),
        lambda path: path.with_name("copy").write_bytes(path.read_bytes()) and path.with_name("copy").replace(path),
    ],
    ids=["removed", "emptied", "renamed", "replaced by a copy"],
)
def test_a_file_that_others_took_away_takes_no_more(path: Path, meddle: Any) -> None:
    ledger = HistoryFile(path, 100)
    meddle(path)
    with pytest.raises(NotStoredError, match="removed or changed"):
        ledger.append([(A, ObservedPeak(1, 5))])
    ledger.close()
    assert found(path) == {}


# --- a disk that says nothing ----------------------------------------------------------------------------------------


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


def test_a_silent_disk_is_told_and_what_it_stored_late_is_known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        history = History(path, SHORT)
        disk = Disk(monkeypatch)
        first = asyncio.create_task(history.observe(A, 5))
        await asyncio.sleep(0.1)
        behind = asyncio.create_task(history.observe(B, 7))
        with pytest.raises(NotStoredError, match=r"says nothing for 0\.2 s"):
            await first
        start = time.perf_counter()
        with pytest.raises(NotStoredError, match="still has an earlier one"):
            await history.observe(C, 9)
        assert time.perf_counter() - start < 0.05, "at once"
        with pytest.raises(NotStoredError):
            await behind
        assert remembered(history) == {}, "nothing is known before it is on the disk"
        disk.answers.set()
        while not history.get(A):
            await asyncio.sleep(0.01)
        assert await history.observe(C, 9) == ObservedPeak(1, 9)
        assert remembered(history) == {A: ObservedPeak(1, 5), C: ObservedPeak(1, 9)}, "B's asker had given up before"
        await history.close()
        assert found(path) == remembered(history)

    asyncio.run(scenario())


def test_who_leaves_does_not_make_memory_and_file_differ(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert found(path) == {A: ObservedPeak(2, 5)}


def test_what_is_being_written_is_waited_for_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert found(path) == {A: ObservedPeak(1, 5)}, "and another may have it"

    asyncio.run(scenario())


def test_a_process_ends_though_its_disk_says_nothing(path: Path) -> None:
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
    assert "says nothing" in done.stdout
    told(path, (B, 1))  # and the kernel freed the lock
