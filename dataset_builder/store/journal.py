"""The journal of a build, `journal.jsonl`: a header, and a line for each row or rejection.

A line survives the end of the process when `append` returns, and a crash of the machine after the next sync; closing
waits for that sync. A build can therefore be stopped at any time.
"""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vramcast.dataset_builder.rows import SCHEMA_VERSION, Rejection, Row
from vramcast.dataset_builder.store.lines import HEADER, REJECTION, ROW, encode_line, valid_records
from vramcast.dataset_builder.store.reader import JOURNAL_NAME
from vramcast.errors import UserError
from vramcast.files.durable import BackgroundSync, locked, sync, write_all
from vramcast.virtual_gpu.canonical import canonical_json

EXTENSIBLE = "n"
"""The only setting that may change when a build is resumed; the header keeps its first value."""

_CHANGES_SHOWN = 4
_VALUE_SHOWN = 80
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JournalWriter:
    """Creates or resumes a journal; use it as a context manager. With `is_locked`, the caller has locked the directory.

    After entering, `row_ids` and `rejected_ids` hold the ids in the journal, and `torn` is a note if an incomplete last
    line was removed.
    """

    def __init__(self, directory: Path | str, build: Mapping[str, Any], *, is_locked: bool = False) -> None:
        self.directory = Path(directory)
        self.path = self.directory / JOURNAL_NAME
        self.build: dict[str, Any] = json.loads(canonical_json(dict(build)))
        self.row_ids: set[str] = set()
        self.rejected_ids: set[str] = set()
        self.torn: str | None = None
        self._is_locked = is_locked
        self._fd: int | None = None
        self._sync: BackgroundSync | None = None
        self._end_bytes = 0
        self._unfinished = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not self._is_locked:
                stack.enter_context(locked(self.directory))
            self._read()
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def append(self, record: Row | Rejection) -> None:
        """Append a record; it survives the end of this process when this returns, and a crash after the next sync."""
        key = record.spec.id
        if key in self.row_ids or key in self.rejected_ids:
            raise ValueError(f"the journal in {self.directory} already has the id {key}")
        is_row = isinstance(record, Row)
        self._write(encode_line(ROW if is_row else REJECTION, record.to_json()))
        (self.row_ids if is_row else self.rejected_ids).add(key)

    def _read(self) -> None:
        """Read the ids in the journal and the length of its valid part."""
        self.row_ids, self.rejected_ids, self.torn = set(), set(), None
        self._end_bytes, self._unfinished = 0, False
        if not self.path.exists():
            return
        changed: list[str] = []
        for line, record in valid_records(self.path, self._note_torn):
            if line.number == 1:
                changed = self._changes(record.get("build"))
            elif changed:
                raise self._refused(changed)
            else:
                (self.row_ids if record["type"] == ROW else self.rejected_ids).add(record["id"])
            self._end_bytes += len(line.raw)
        if self._end_bytes == 0:
            _check_beginning(self.path)
        elif changed:  # only a header, left by a build that failed on its first spec
            self._end_bytes = 0

    def _note_torn(self, note: str) -> None:
        self.torn = note

    def _changes(self, before: Mapping[str, Any] | None) -> list[str]:
        if before is None:
            raise UserError(
                f"expected the settings of the build in {self.path}, found that a repair had lost them: "
                "its rows can be read, but choose another out=DIR to build more"
            )
        return _differences(before, self.build)

    def _refused(self, changed: list[str]) -> UserError:
        more = f" and {len(changed) - _CHANGES_SHOWN} more" if len(changed) > _CHANGES_SHOWN else ""
        return UserError(
            f"expected the settings with which {self.directory} was started, "
            f"found {', '.join(changed[:_CHANGES_SHOWN])}{more}: use the same settings or another out=DIR"
        )

    def _open(self, stack: ExitStack) -> None:
        """Open for appending: sync the directory entry, drop an incomplete line, and write the header."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            stack.callback(self._close, self._fd)
            os.ftruncate(self._fd, self._end_bytes)
            os.fsync(self._fd)
            sync(self.directory)
            sync(self.directory.resolve().parent)
        except OSError as error:
            raise self._failed(error) from error
        self._sync = BackgroundSync(self._fd)
        if self._end_bytes == 0:
            self._write(encode_line(HEADER, {"schema": SCHEMA_VERSION, "build": self.build}))

    def _close(self, fd: int) -> None:
        self._fd = None
        try:
            if self._sync is not None:
                self._sync.close()
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._sync = None
            os.close(fd)

    def _write(self, line: bytes) -> None:
        if self._fd is None or self._sync is None:
            raise RuntimeError("a journal can only be written inside its 'with' block")
        try:
            self._settle(self._fd)
            self._unfinished = True
            write_all(self._fd, line)
            self._sync.request()
        except OSError as error:
            with suppress(OSError):
                self._settle(self._fd)
            raise self._failed(error) from error
        self._end_bytes += len(line)
        self._unfinished = False

    def _settle(self, fd: int) -> None:
        """Truncate an interrupted write; raise UserError if another program changed the file."""
        if self._unfinished:
            os.ftruncate(fd, self._end_bytes)
            self._unfinished = False
        stat = os.fstat(fd)
        if stat.st_size != self._end_bytes or stat.st_nlink == 0:
            what = "was removed" if stat.st_nlink == 0 else "was changed by another program"
            raise UserError(
                f"expected only this build to write {self.path}, found that it {what}: "
                "stop the other program and run the same command again"
            )

    def _failed(self, error: OSError) -> UserError:
        fix = "free some" if error.errno in _NO_ROOM else "fix that"
        return UserError(
            f"expected room to write a row in {self.directory}, found: {error.strerror}; "
            f"{fix} and run the same command again: {len(self.row_ids)} rows are safe"
        )


def _check_beginning(path: Path) -> None:
    """Raise UserError if the file is not the beginning of a journal, so that it is not overwritten."""
    signature = encode_line(HEADER, {})[:16]
    with path.open("rb") as file:
        beginning = file.read(len(signature))
    if not signature.startswith(beginning):
        raise UserError(f"expected a journal at {path}, found another kind of file: move it away")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = _flat(before), _flat(now)
    return [
        f"{key}={_short(new.get(key, 'nothing'))} (it was {_short(old.get(key, 'nothing'))})"
        for key in sorted(old.keys() | new.keys())
        if key != EXTENSIBLE and (key not in old or key not in new or old[key] != new[key])
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key, so that a message can name the one that differs."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            result.update(_flat(value, f"{name}."))
        elif _is_pairs(value):  # a mapping whose order matters
            result.update({name: [item for item, _ in value], **_flat(dict(value), f"{name}.")})
        else:
            result[name] = value
    return result


def _is_pairs(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 for item in value)
    return pairs and bool(value) and all(isinstance(item[0], str) and isinstance(item[1], Mapping) for item in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_SHOWN else f"{text[:_VALUE_SHOWN]}..."
