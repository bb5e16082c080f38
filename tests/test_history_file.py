"""The file of the history: after a crash, a full disk, or a change by another program."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from history_files import A, B, C, full_disk, read_lines, read_peaks, write_runs

from vramcast.collocation.observed_peak import REPEAT_MARGIN, ObservedPeak, reservation_bytes
from vramcast.collocation.service import history_file
from vramcast.collocation.service.history_file import HistoryFile, NotStoredError
from vramcast.dataset_builder.store.lines import encode_line
from vramcast.errors import UserError
from vramcast.files import durable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def test_the_margin_is_on_top_of_the_peak() -> None:
    assert reservation_bytes(0) == 0
    assert reservation_bytes(1) == 2
    assert reservation_bytes(1000) == 1000 + 1000 * REPEAT_MARGIN


def test_the_last_line_of_a_job_counts_after_a_restart(path: Path) -> None:
    write_runs(path, (A, 5), (B, 7), (A, 9), (A, 3))
    assert len(read_lines(path)) == 5, "appended only"
    assert read_peaks(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(3, 9)}
    assert [line.get("runs") for line in read_lines(path)] == [None, 1, 3], "and shorter after a start"
    assert read_peaks(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(3, 9)}
    write_runs(path, (C, 1))
    assert list(read_peaks(path)) == [B, A, C]


def test_a_forgotten_job_stays_forgotten_after_a_restart(path: Path) -> None:
    write_runs(path, (A, 5), (B, 7))
    file = HistoryFile(path, 100)
    file.append([(A, None), (C, None)])
    file.close()
    assert read_peaks(path) == {B: ObservedPeak(1, 7)}
    assert b"forgotten" not in path.read_bytes()
    write_runs(path, (A, 1))
    assert read_peaks(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(1, 1)}


def test_a_truncated_last_line_is_ignored(path: Path) -> None:
    write_runs(path, (A, 5), (B, 7))
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in {*range(0, len(whole), 16), *(end + by for end in ends for by in (-1, 0, 1) if end + by < len(whole))}:
        path.write_bytes(whole[:size])
        peaks = read_peaks(path)
        assert set(peaks) == ({A} if size >= ends[1] else set())
        write_runs(path, (C, 1))
        assert read_peaks(path) == {**peaks, C: ObservedPeak(1, 1)}, "and what follows is whole"


def test_a_damaged_line_is_logged_and_moved_to_another_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_runs(path, (A, 5), (B, 7), (C, 9))
    path.write_bytes(path.read_bytes().replace(b'"peak_bytes":7', b'"peak_bytes":1'))
    assert set(read_peaks(path)) == {A, C}
    assert [record.message for record in caplog.records] == ["lines of the history left out"]
    caplog.clear()
    assert set(read_peaks(path)) == {A, C}
    assert not caplog.text, "it is gone from there"
    assert b'"peak_bytes":1' in path.with_name("history.jsonl.damaged").read_bytes(), "but not thrown away"


@pytest.mark.parametrize("content", [b"name,mib\nresnet,5\n", b'{"name": "x"}\n', b"\x00" * 400, b"{}"])
def test_a_file_of_another_kind_is_refused_and_not_changed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"expected a history .* another kind of file: choose another --history FILE"):
        HistoryFile(path, 100)
    assert path.read_bytes() == content
    path.unlink()
    write_runs(path, (A, 1))  # and the lock was let go


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
def test_an_intact_line_of_an_unknown_kind_is_refused_and_not_changed(path: Path, line: bytes) -> None:
    write_runs(path, (A, 5), (A, 6))
    path.write_bytes(whole := path.read_bytes() + line)
    with pytest.raises(UserError, match=r"expected lines of version 1 .* another in line 4 .*: install a newer"):
        HistoryFile(path, 100)
    assert path.read_bytes() == whole


def test_another_version_is_refused(path: Path) -> None:
    path.write_bytes(whole := encode_line("history", {"version": 7}) + b"whatever\n")
    with pytest.raises(UserError, match=r"expected a history of version 1 .*, found version 7: install a newer"):
        HistoryFile(path, 100)
    assert path.read_bytes() == whole


def test_a_path_that_cannot_be_a_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="--history FILE"):
            HistoryFile(place, 100)


def test_a_second_writer_is_refused_until_the_first_ends(path: Path) -> None:
    file = HistoryFile(path, 100)
    link = path.with_name("link")
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(UserError, match=rf"another service \(process {os.getpid()} on .* choose another --history"):
            HistoryFile(name, 100)
    file.close()
    imports = "import os; from pathlib import Path; from vramcast.collocation.service.history_file import HistoryFile"
    code = f"{imports}; file = HistoryFile(Path({str(path)!r}), 1); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    write_runs(path, (A, 1))


def test_the_numbers_of_jobs_and_lines_are_bounded(path: Path) -> None:
    for index in range(60):
        write_runs(path, (bytes([index % 5]) * 16, index + 1), most=2)
        assert len(read_lines(path)) <= 1 + 2 * history_file._SPARE
    assert read_peaks(path, 2) == {b"\x03" * 16: ObservedPeak(1, 59), b"\x04" * 16: ObservedPeak(1, 60)}
    assert read_peaks(path, 1) == {b"\x04" * 16: ObservedPeak(1, 60)}
    assert len(read_lines(path)) == 2


def test_a_full_disk_loses_no_stored_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = HistoryFile(path, 100)
    file.append([(A, ObservedPeak(1, 5))])
    whole = path.read_bytes()
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 40:
            full_disk()
        return write(fd, data[: len(data) // 2])

    for name, broken in (("write", half), ("write", full_disk), ("fsync", full_disk)):
        with monkeypatch.context() as patch:
            patch.setattr(history_file.os, name, broken)
            with pytest.raises(NotStoredError, match="No space left"):
                file.append([(B, ObservedPeak(1, 7))])
        assert path.read_bytes() == whole
    with monkeypatch.context() as patch:  # nor can what it left be cut off
        patch.setattr(history_file.os, "write", half)
        patch.setattr(history_file.os, "ftruncate", full_disk)
        with pytest.raises(NotStoredError):
            file.append([(B, ObservedPeak(1, 7))])
    assert len(path.read_bytes()) > len(whole)
    file.append([(C, ObservedPeak(1, 9))])
    file.close()
    assert read_peaks(path) == {A: ObservedPeak(1, 5), C: ObservedPeak(1, 9)}


def test_a_file_that_cannot_be_shortened_is_not_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_runs(path, (A, 5), (A, 9))
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full_disk)
        assert read_peaks(path) == {A: ObservedPeak(2, 9)}
        assert path.read_bytes() == whole
        assert [item.name for item in path.parent.iterdir() if "tmp" in item.name] == []
        write_runs(path, (B, 7), *[(A, 1)] * 5, most=2)
    assert read_peaks(path) == {B: ObservedPeak(1, 7), A: ObservedPeak(7, 9)}


def test_a_shortened_file_is_used_after_its_directory_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = HistoryFile(path, 100)
    file.append([(A, ObservedPeak(1, 5)), (A, ObservedPeak(2, 9))])
    synced, sync = [], durable.sync
    with monkeypatch.context() as patch:  # the new file has its name, but the directory cannot be synced
        patch.setattr(durable, "sync", lambda name: full_disk() if name.is_dir() else sync(name))
        patch.setattr(history_file, "sync", full_disk)
        file.shorten([(A, ObservedPeak(2, 9))])
        assert len(read_lines(path)) == 2
        with pytest.raises(NotStoredError, match="No space left"):
            file.append([(B, ObservedPeak(1, 7))])
    monkeypatch.setattr(history_file, "sync", synced.append)
    file.append([(B, ObservedPeak(1, 7))])
    file.append([(C, ObservedPeak(1, 7))])
    file.close()
    assert synced == [path.parent]
    assert set(read_peaks(path)) == {A, B, C}


def test_no_file_handle_leaks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc here")
    before = handles()
    file = HistoryFile(path, 100)
    opened = handles()
    for broken in (False, True):
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(Path, "replace", full_disk)
            file.shorten([(A, ObservedPeak(1, 5))])
            assert handles() == opened
    file.append([(B, ObservedPeak(1, 7))])
    file.close()
    assert handles() == before
    assert set(read_peaks(path)) == {A, B}


def test_a_temporary_file_of_a_dead_process_is_ignored(path: Path) -> None:
    path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(b"left\n" * 100)
    write_runs(path, (A, 5), (A, 6))
    assert read_peaks(path) == read_peaks(path) == {A: ObservedPeak(2, 6)}


def test_the_directory_of_a_new_file_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_file_that_another_program_changed_is_not_written(path: Path, meddle: Any) -> None:
    file = HistoryFile(path, 100)
    meddle(path)
    with pytest.raises(NotStoredError, match="removed or changed"):
        file.append([(A, ObservedPeak(1, 5))])
    file.close()
    assert read_peaks(path) == {}
