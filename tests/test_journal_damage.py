"""A journal with incomplete lines, flipped bytes, killed writers, full disks and other writers loses no valid line."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from journals import BUILD, make_row, write

from vramcast.dataset_builder.rows import SCHEMA_VERSION
from vramcast.dataset_builder.store import JournalWriter, iter_records, read_header, read_journal, repair
from vramcast.dataset_builder.store.lines import encode_line
from vramcast.errors import UserError


def flip(path: Path, offset: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


# --- damage ---


def test_an_incomplete_last_line_loses_only_itself(tmp_path, no_sync):
    """Cut the file at every byte of its last line: all lines before it are read, and writing continues."""
    path = write(tmp_path, [1, 2, 3])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        journal = read_journal(path)
        assert journal.rows == [make_row(1), make_row(2)], end
        assert (journal.torn is None) == (end == last)
        with JournalWriter(tmp_path, BUILD) as writer:
            assert writer.torn == journal.torn
            assert len(writer.row_ids) == 2
            writer.append(make_row(3))
        assert path.read_bytes() == whole, end


def test_an_incomplete_header_is_written_again(tmp_path, no_sync):
    path = write(tmp_path, [])
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match="run the build again"):
            read_journal(path)
        write(tmp_path, [])
        assert path.read_bytes() == whole, end


def test_a_file_of_another_kind_is_not_changed(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"dear": "diary"}\n')
    with pytest.raises(UserError, match="another kind of file"), JournalWriter(tmp_path, BUILD):
        pass
    with pytest.raises(UserError, match="no valid line"):
        repair(tmp_path)
    assert path.read_text() == '{"dear": "diary"}\n'


def test_every_flipped_byte_in_the_middle_is_detected(tmp_path, no_sync):
    path = write(tmp_path, [1, 2, 3])
    whole = path.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(whole) if byte == ord("\n"))]
    for offset in range(starts[1], starts[2], 7):
        path.write_bytes(whole)
        flip(path, offset)
        with pytest.raises(UserError, match=r"line 2 .*vramcast build repair"):
            read_journal(path)
    with pytest.raises(UserError, match="line 2 "), JournalWriter(tmp_path, BUILD):
        pass


def test_a_flipped_byte_in_the_last_line_is_skipped_with_a_note(tmp_path):
    path = write(tmp_path, [1, 2])
    flip(path, path.stat().st_size - 60)
    journal = read_journal(path)
    assert journal.rows == [make_row(1)]
    assert "line 3, does not match its checksum" in journal.torn
    with pytest.warns(UserWarning, match="line 3"):
        assert len(list(iter_records(path))) == 1


def test_a_valid_journal_is_read_without_a_warning(tmp_path):
    path = write(tmp_path, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(iter_records(path)) == [make_row(1)]


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        (encode_line("header", {"schema": SCHEMA_VERSION, "build": {}}), "second header"),
        (encode_line("row", make_row(1).to_json()), "repeats the id"),
        (encode_line("song", {"id": "x"}), "unknown type 'song'"),
    ],
)
def test_lines_of_another_journal_are_detected_even_at_the_end(tmp_path, extra, fault):
    path = write(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(UserError, match=f"line 4 .*{fault}"):
        read_journal(path)
    assert list(repair(tmp_path).moved) == [4]
    assert len(read_journal(path).rows) == 2


def test_repair_moves_bad_lines_and_keeps_the_rest(tmp_path):
    path = write(tmp_path, range(1, 6))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"\xff\x00 not a line\n"
    lines[4] = encode_line("row", {"id": "abc", "spec": {}})  # a good checksum and no row
    lines[5] = lines[5][:-9]
    path.write_bytes(b"".join(lines))
    path.chmod(0o640)
    report = repair(tmp_path)
    assert (report.valid, list(report.moved), report.header_lost) == (2, [3, 5, 6], False)
    assert "does not match the schema" in report.moved[5]
    assert str(report).startswith(f"2 rows and rejections are valid, 3 moved to {report.bad_path} (line 3 does not")
    assert path.stat().st_mode & 0o777 == 0o640
    assert report.bad_path.read_bytes() == lines[2] + lines[4] + lines[5] + b"\n"
    assert read_journal(path).rows == [make_row(1), make_row(3)]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["journal.bad", "journal.jsonl", "lock"]
    assert write(tmp_path, [2]).read_bytes().startswith(lines[0] + lines[1] + lines[3])


def test_repair_of_a_valid_journal_changes_nothing(tmp_path):
    path = write(tmp_path, [1])
    before = path.read_bytes()
    report = repair(path)
    assert (report.valid, dict(report.moved), report.bad_path.exists()) == (1, {}, False)
    assert str(report) == "1 rows and rejections are valid, none had to be moved"
    assert path.read_bytes() == before


def test_rows_survive_the_loss_of_their_header(tmp_path):
    path = write(tmp_path, [1, 2])
    flip(path, 30)
    report = repair(tmp_path)
    assert report.header_lost
    assert "cannot be resumed" in str(report)
    assert read_journal(path).rows == [make_row(1), make_row(2)]
    assert read_header(path).build is None
    with pytest.raises(UserError, match="another out=DIR"), JournalWriter(tmp_path, BUILD):
        pass


# --- other processes ---

HOLD = """
import sys, time
from vramcast.dataset_builder.store import JournalWriter
with JournalWriter(sys.argv[1], {"seed": 1}):
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_one_writer_and_a_killed_one_releases_its_lock(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        for act in (lambda: write(tmp_path, [1]), lambda: repair(tmp_path)):
            with pytest.raises(UserError, match=rf"{tmp_path}.* another build \(process {holder.pid} on"):
                act()
        assert read_journal(tmp_path).rows == []  # reading needs no lock
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with JournalWriter(tmp_path, {"seed": 1}) as writer:
        writer.append(make_row(1))


def test_a_second_writer_in_the_same_process_is_refused(tmp_path):
    with (
        JournalWriter(tmp_path, BUILD),
        pytest.raises(UserError, match=f"process {os.getpid()} "),
        JournalWriter(tmp_path, BUILD),
    ):
        pass


WRITE = """
import sys
from journals import BUILD, make_row
from vramcast.dataset_builder.store import JournalWriter
with JournalWriter(sys.argv[1], BUILD) as writer:
    for i in range(100000):
        writer.append(make_row(i))
        print(i, flush=True)
"""


def child(code: str, *args: object, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "support")}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


def test_appended_rows_survive_a_kill_and_can_be_read_meanwhile(tmp_path):
    with child(WRITE, tmp_path) as writer:
        for wanted in (3, 20, 40):
            while int(writer.stdout.readline()) < wanted:
                pass
            assert len(read_journal(tmp_path).rows) > wanted
            time.sleep(0.01)
        writer.kill()
        printed = [int(line) for line in writer.stdout.read().split()]
    rows = read_journal(tmp_path).rows
    assert len(rows) >= (printed[-1] if printed else 40) + 1
    assert rows == [make_row(i) for i in range(len(rows))]


FULL = """
import resource, signal, sys
from pathlib import Path
from journals import BUILD, make_row
from vramcast.errors import UserError
from vramcast.dataset_builder.store import JournalWriter, read_journal
directory, limit = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    with JournalWriter(directory, BUILD) as writer:
        i = 0
        try:
            while True:
                writer.append(make_row(i))
                i += 1
        except UserError as error:
            print(error)
            assert f"{i} rows are safe" in str(error), error
        journal = read_journal(directory)
        assert journal.rows == [make_row(j) for j in range(i)] and journal.torn is None
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.append(make_row(i))
    assert len(read_journal(directory).rows) == i + 1
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [10, 1000, 4096])
def test_a_full_disk_loses_no_row(tmp_path, limit):
    """With a limit of the kernel, a part of the line is written before the write fails."""
    with child(FULL, tmp_path, limit) as process:
        output = process.stdout.read()
    assert process.returncode == 0
    assert output.startswith(f"expected room to write a row in {tmp_path}, found: File too large; free some")
    write(tmp_path, [10**6])
    assert read_journal(tmp_path).rows[-1] == make_row(10**6)


def test_a_failing_disk_loses_no_row_even_if_truncation_fails(tmp_path, monkeypatch):
    real = os.write

    def fail(*_):
        raise OSError(5, "Input/output error")

    def write_a_part(fd, data):
        real(fd, bytes(data)[:10])
        fail()

    with JournalWriter(tmp_path, BUILD) as writer:
        writer.append(make_row(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_a_part)
            patch.setattr(os, "ftruncate", fail)
            for _ in range(2):
                with pytest.raises(UserError, match=r"found: Input/output error; fix that .* 1 rows are safe"):
                    writer.append(make_row(2))
        writer.append(make_row(2))
    assert read_journal(tmp_path).rows == [make_row(1), make_row(2)]


def test_a_failed_sync_is_raised_at_the_latest_on_close(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with (
        pytest.raises(UserError, match="found: Input/output error; fix that"),
        JournalWriter(tmp_path, BUILD) as writer,
    ):
        monkeypatch.setattr(os, "fdatasync", fail)
        writer.append(make_row(1))
    monkeypatch.undo()
    write(tmp_path, [2])
    assert read_journal(tmp_path).rows[-1] == make_row(2)


def test_everything_is_synced_when_the_journal_is_closed(tmp_path, monkeypatch):
    """On a slow disk rows share a sync; the last sync starts after the last row is written."""
    real, sizes = os.fdatasync, []

    def slow(fd):
        time.sleep(0.01)
        sizes.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    write(tmp_path, range(50))
    assert sizes[-1] == (tmp_path / "journal.jsonl").stat().st_size
    assert len(sizes) < 50


def test_an_interrupted_write_is_undone_by_the_next(tmp_path, monkeypatch):
    real = os.write

    def interrupted(fd, data):
        real(fd, bytes(data)[:10])
        raise KeyboardInterrupt

    with JournalWriter(tmp_path, BUILD) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.append(make_row(1))
        writer.append(make_row(1))
    assert read_journal(tmp_path).rows == [make_row(1)]


def test_a_file_changed_by_others_is_not_written(tmp_path):
    with JournalWriter(tmp_path, BUILD) as writer:
        writer.append(make_row(1))
        with writer.path.open("ab") as file:
            file.write(encode_line("row", make_row(5).to_json()))
        with pytest.raises(UserError, match="changed by another"):
            writer.append(make_row(2))
    assert read_journal(tmp_path).rows == [make_row(1), make_row(5)]
    with JournalWriter(tmp_path, BUILD) as writer:
        writer.path.unlink()
        with pytest.raises(UserError, match="was removed"):
            writer.append(make_row(2))
