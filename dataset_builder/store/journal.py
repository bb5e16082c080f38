"""The journal of a build: `journal.jsonl`, a header and then a line for each row or rejection.

When `append` returns, no end of the process can lose the line; it is on the disk one sync later, and closing waits for
that. So a build may be stopped at any time, in any way.
"""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vramcast.dataset_builder.schema import SCHEMA_VERSION, Rejection, Row
from vramcast.dataset_builder.store.durable import BackgroundSync, locked, sync, write_all
from vramcast.dataset_builder.store.lines import HEADER, REJECTION, ROW, encode_line, sound_records
from vramcast.dataset_builder.store.reader import JOURNAL_NAME
from vramcast.errors import UserError
from vramcast.virtual_gpu.records import canonical_json

EXTENSIBLE = "n"
"""The one setting that may change between runs: more rows of the same build. The header keeps the first."""

_CHANGES_SHOWN = 4
_VALUE_SHOWN = 80
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JournalWriter:
    """Creates a journal or continues one; use it as a context manager.

    After entering, `row_ids` and `rejected_ids` hold what is there already, and `torn` a sentence if a line
    that a crash had cut short was removed.
    """

    def __init__(self, directory: Path | str, build: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self.path = self.directory / JOURNAL_NAME
        self.build: dict[str, Any] = json.loads(canonical_json(dict(build)))
        self.row_ids: set[str] = set()
        self.rejected_ids: set[str] = set()
        self.torn: str | None = None
        self._fd: int | None = None
        self._sync: BackgroundSync | None = None
        self._end_bytes = 0
        self._unfinished = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
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
        """Add a record: safe from the end of this process when this returns, and on the disk a sync later."""
        key = record.spec.id
        if key in self.row_ids or key in self.rejected_ids:
            raise ValueError(f"the journal in {self.directory} has the id {key} already")
        is_row = isinstance(record, Row)
        self._write(encode_line(ROW if is_row else REJECTION, record.to_json()))
        (self.row_ids if is_row else self.rejected_ids).add(key)

    def _read(self) -> None:
        """Learn what is there, and where its sound part ends."""
        self.row_ids, self.rejected_ids, self.torn = set(), set(), None
        self._end_bytes, self._unfinished = 0, False
        if not self.path.exists():
            return
        changed: list[str] = []
        for line, record in sound_records(self.path, self._note_torn):
            if line.number == 1:
                changed = self._changes(record.get("build"))
            elif changed:
                raise self._refused(changed)
            else:
                (self.row_ids if record["type"] == ROW else self.rejected_ids).add(record["id"])
            self._end_bytes += len(line.raw)
        if self._end_bytes == 0:
            _check_beginning(self.path)
        elif changed:  # a header alone, as a build leaves it that failed on its first spec
            self._end_bytes = 0

    def _note_torn(self, note: str) -> None:
        self.torn = note

    def _changes(self, before: Mapping[str, Any] | None) -> list[str]:
        if before is None:
            raise UserError(
                f"expected the settings of the build in {self.path}, found that a repair had lost them: "
                "its rows can be read, choose another out=DIR to build more"
            )
        return _differences(before, self.build)

    def _refused(self, changed: list[str]) -> UserError:
        more = f" and {len(changed) - _CHANGES_SHOWN} more" if len(changed) > _CHANGES_SHOWN else ""
        return UserError(
            f"expected the settings with which {self.directory} was begun, "
            f"found {', '.join(changed[:_CHANGES_SHOWN])}{more}: use the same settings or another out=DIR"
        )

    def _open(self, stack: ExitStack) -> None:
        """Open for appending, with a durable name, a header and no torn line."""
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
            raise RuntimeError("a journal is written inside its 'with' block")
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
        """Cut off what an interrupted write left; refuse to go on if others changed the file."""
        if self._unfinished:
            os.ftruncate(fd, self._end_bytes)
            self._unfinished = False
        found = os.fstat(fd)
        if found.st_size != self._end_bytes or found.st_nlink == 0:
            what = "was removed" if found.st_nlink == 0 else "was changed by another program"
            raise UserError(
                f"expected this build alone to write {self.path}, found that it {what}: "
                "stop the other and run the same command again"
            )

    def _failed(self, error: OSError) -> UserError:
        mend = "free some" if error.errno in _NO_ROOM else "mend that"
        return UserError(
            f"expected room to write a row in {self.directory}, found: {error.strerror}; "
            f"{mend} and run the same command again: {len(self.row_ids)} rows are safe"
        )


def _check_beginning(path: Path) -> None:
    """Refuse to write over a file that never was a journal, though it has but one line."""
    sign = encode_line(HEADER, {})[:16]
    with path.open("rb") as file:
        found = file.read(len(sign))
    if not sign.startswith(found):
        raise UserError(f"expected a journal at {path}, found another kind of file: move it away")


def _differences(before: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    old, new = _flat(before), _flat(asked)
    return [
        f"{key}={_short(new.get(key, 'nothing'))} (it was {_short(old.get(key, 'nothing'))})"
        for key in sorted(old.keys() | new.keys())
        if key != EXTENSIBLE and (key not in old or key not in new or old[key] != new[key])
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, so that a message names the one that differs."""
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
