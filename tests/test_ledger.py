"""The file of what jobs took: what a crash, a full disk or another program may do to it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collocation.history import REPEAT_MARGIN, Observed, repeated_bytes
from collocation.service import ledger as ledger_module
from collocation.service.ledger import Ledger, NotStoredError
from dataset_builder.errors import UserError

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def told(path: Path, *seen: tuple[bytes, int], most: int = 100) -> None:
    """One service that is told of some runs, each on its own."""
    ledger = Ledger(path, most)
    for key, peak_bytes in seen:
        ledger.append([(key, Observed(1, peak_bytes))])
    ledger.close()


def found(path: Path, most: int = 100) -> dict[bytes, Observed]:
    """What the next one knows."""
    ledger = Ledger(path, most)
    ledger.close()
    return dict(ledger.found)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def test_the_margin_is_on_top_of_the_peak() -> None:
    assert repeated_bytes(0) == 0
    assert repeated_bytes(1) == 2
    assert repeated_bytes(1000) == 1000 + 1000 * REPEAT_MARGIN


def test_what_was_told_is_found_again_and_lines_of_a_job_are_joined(path: Path) -> None:
    told(path, (A, 5), (B, 7), (A, 9), (A, 3))
    assert len(lines(path)) == 5, "appended only"
    assert found(path) == {B: Observed(1, 7), A: Observed(3, 9)}
    assert [line.get("runs") for line in lines(path)] == [None, 1, 3], "and shorter after a start"
    assert found(path) == {B: Observed(1, 7), A: Observed(3, 9)}
    told(path, (C, 1))
    assert list(found(path)) == [B, A, C]


def test_a_line_that_was_cut_short_is_no_line(path: Path) -> None:
    told(path, (A, 5), (B, 7))
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in {*range(0, len(whole), 16), *(end + by for end in ends for by in (-1, 0, 1) if end + by < len(whole))}:
        path.write_bytes(whole[:size])
        kept = found(path)
        assert set(kept) == ({A} if size >= ends[1] else set())
        told(path, (C, 1))
        assert found(path) == {**kept, C: Observed(1, 1)}, "and what follows is whole"


def test_a_damaged_line_is_left_out_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told(path, (A, 5), (B, 7), (C, 9))
    path.write_bytes(path.read_bytes().replace(b'"peak_bytes":7', b'"peak_bytes":1'))
    assert set(found(path)) == {A, C}
    assert [record.message for record in caplog.records] == ["lines of the history left out"]
    caplog.clear()
    assert set(found(path)) == {A, C}
    assert not caplog.text, "it is gone"


@pytest.mark.parametrize("content", [b"name,mib\nresnet,5\n", b'{"name": "x"}\n', b"\x00" * 400, b"{}"])
def test_a_file_of_others_is_refused_and_stays_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"expected a history .* another kind of file: choose another --history FILE"):
        Ledger(path, 100)
    assert path.read_bytes() == content
    path.unlink()
    told(path, (A, 1))  # and the lock was let go


def test_what_cannot_be_a_file_is_one_sentence(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="--history FILE"):
            Ledger(place, 100)


def test_a_second_writer_is_refused_and_the_lock_ends_with_its_holder(path: Path) -> None:
    ledger = Ledger(path, 100)
    link = path.with_name("link")
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(UserError, match=rf"another service \(process {os.getpid()} on .* choose another --history"):
            Ledger(name, 100)
    ledger.close()
    imports = "import os; from pathlib import Path; from collocation.service.ledger import Ledger"
    code = f"{imports}; kept = Ledger(Path({str(path)!r}), 1); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    told(path, (A, 1))


def test_only_so_many_jobs_are_kept_and_only_so_many_lines(path: Path) -> None:
    ledger = Ledger(path, 2)
    for index in range(60):
        ledger.append([(bytes([index % 5]) * 16, Observed(1, index))])
        assert len(lines(path)) <= 1 + 2 * ledger_module._SPARE
    ledger.close()
    assert list(found(path, 2)) == [b"\x03" * 16, b"\x04" * 16]
    assert found(path, 1) == {b"\x04" * 16: found(path, 1)[b"\x04" * 16]}
    assert len(lines(path)) == 2


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_loses_nothing_that_was_stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, 100)
    ledger.append([(A, Observed(1, 5))])
    whole = path.read_bytes()
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 40:
            full()
        return write(fd, data[: len(data) // 2])

    for name, broken in (("write", half), ("write", full), ("fsync", full)):
        with monkeypatch.context() as patch:
            patch.setattr(ledger_module.os, name, broken)
            with pytest.raises(NotStoredError, match="No space left"):
                ledger.append([(B, Observed(1, 7))])
        assert path.read_bytes() == whole
    with monkeypatch.context() as patch:  # nor can what it left be cut off
        patch.setattr(ledger_module.os, "write", half)
        patch.setattr(ledger_module.os, "ftruncate", full)
        with pytest.raises(NotStoredError):
            ledger.append([(B, Observed(1, 7))])
    assert len(path.read_bytes()) > len(whole)
    ledger.append([(C, Observed(1, 9))])
    ledger.close()
    assert found(path) == {A: Observed(1, 5), C: Observed(1, 9)}


def test_without_room_to_make_it_shorter_the_file_stays_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(path, (A, 5), (A, 9))
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert found(path) == {A: Observed(2, 9)}
        assert path.read_bytes() == whole
        assert [item.name for item in path.parent.iterdir() if "tmp" in item.name] == []
        told(path, (B, 7), *[(A, 1)] * 5, most=2)
    assert found(path) == {B: Observed(1, 7), A: Observed(7, 9)}


@pytest.mark.parametrize("meddle", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_file_that_others_took_away_takes_no_more(path: Path, meddle: Any) -> None:
    ledger = Ledger(path, 100)
    meddle(path)
    with pytest.raises(NotStoredError, match="removed or changed"):
        ledger.append([(A, Observed(1, 5))])
    ledger.close()
    assert found(path) == {}
