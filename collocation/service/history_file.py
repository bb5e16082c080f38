"""The file of what jobs were seen to take: a line for each change, on the disk before anybody is told.

A line holds the job's hash and all that is known of it, so the last one of a job counts, whatever else was forgotten.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.logs import event
from vramcast.dataset_builder.store.durable import held, replacing, sync, write_all
from vramcast.dataset_builder.store.lines import decode_line, encode_line
from vramcast.errors import UserError

Change = tuple[bytes, ObservedPeak | None]
"""A job's key and what is known of it from now on; None where it is forgotten."""

_HISTORY, _VERSION = "history", 1
_HEADER = encode_line(_HISTORY, {"version": _VERSION})
_KNOWN, _FORGOTTEN, _OBSERVED = "known", "forgotten", "observed"
"""Types of lines; those of the last, which nobody writes any more, are single runs and add up."""
_KEY_BYTES = 16
_MOST = 2**63
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND
_SPARE = 4
"""Lines for each job that may be kept; with more the file is made shorter."""


class NotStoredError(Exception):
    """An observation that is not on the disk, as far as is known."""

    def __init__(self, found: str) -> None:
        super().__init__(f"expected to store what was observed, found: {found}; see to the disk, and send it again")


class HistoryFile:
    """One file with one writer. What it has when it is opened is in `found`, least recently observed first."""

    def __init__(self, path: Path, most_jobs: int) -> None:
        self._path = path.resolve()  # two links to one file are one file
        self._most_jobs = most_jobs
        self._unfinished = self._unsynced = False
        self._damaged: list[bytes] = []
        with ExitStack() as stack:
            lock = self._path.with_name(f"{self._path.name}.lock")
            stack.enter_context(held(lock, self._path, "service", "--history FILE"))
            try:
                self._fd = os.open(self._path, _FLAGS, 0o666)
                stack.callback(lambda: os.close(self._fd))
                self.found, self._lines, self._end_bytes = self._read()
                os.ftruncate(self._fd, self._end_bytes)
                if self._end_bytes == 0:
                    self._write(_HEADER)
                sync(self._path.parent)
            except OSError as error:
                raise UserError(
                    f"expected to write {self._path}, found: {error.strerror}; choose another --history FILE"
                ) from error
            if self._damaged:
                lines = len(self._damaged)
                event("lines of the history left out", logging.WARNING, path=str(self._path), lines=lines)
            if self._lines > len(self.found):
                self.shorten(list(self.found.items()))
            self._stack = stack.pop_all()

    @property
    def is_long(self) -> bool:
        """Whether it is time to make it shorter."""
        return self._lines > _SPARE * self._most_jobs

    def append(self, changes: Sequence[Change]) -> None:
        """Add lines; they are on the disk when this returns, and none of them is in the file where it fails."""
        try:
            self._settle()
            self._write(b"".join(_line(key, known) for key, known in changes))
        except OSError as error:
            with suppress(OSError):
                self._settle()
            event("observation not stored", logging.ERROR, path=str(self._path), reason=str(error))
            raise NotStoredError(error.strerror or str(error)) from error
        self._lines += len(changes)

    def shorten(self, known: Sequence[tuple[bytes, ObservedPeak]]) -> None:
        """Leave a line for each job that is known. Where there is no room for that, the file stays as it is."""
        data = _HEADER + b"".join(_line(key, item) for key, item in known)
        fresh: int | None = None
        try:
            self._settle()
            self._put_damaged_aside()
            with replacing(self._path) as temporary:
                fresh = os.open(temporary, _FLAGS | os.O_TRUNC, 0o666)
                write_all(fresh, data)
        except (UserError, OSError) as error:
            event("history not made shorter", logging.WARNING, path=str(self._path), reason=str(error))
            self._lines = 0  # as many more, and it is tried again
            self._unsynced = True  # it may have failed after the new file took the old one's name
        if fresh is None:
            return
        if not self._is_at_path(fresh):
            os.close(fresh)
            return
        os.close(self._fd)
        self._fd, self._lines, self._end_bytes = fresh, len(known), len(data)

    def close(self) -> None:
        """Let another have the file."""
        self._stack.close()

    def _read(self) -> tuple[OrderedDict[bytes, ObservedPeak], int, int]:
        """What the file says, in how many lines, and where the last whole one ends."""
        found: OrderedDict[bytes, ObservedPeak] = OrderedDict()
        lines = end_bytes = 0
        for number, raw in enumerate(self._raw_lines(), 1):
            end_bytes += len(raw)
            if raw == _HEADER:
                continue
            lines += 1
            record, fault = decode_line(raw)
            if record is None or fault:
                self._damaged.append(raw)
                continue
            try:
                key, known = _change(record, found)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"expected lines of version {_VERSION} in {self._path}, found that line {number} is another "
                    f"({error}): install a newer vramcast, or choose another --history FILE"
                ) from error
            found.pop(key, None)
            if known:
                found[key] = known
            if len(found) > self._most_jobs:
                found.popitem(last=False)
        return found, lines, end_bytes

    def _raw_lines(self) -> Iterator[bytes]:
        """Whole lines, the header first; one that a crash had cut short is no line."""
        with self._path.open("rb") as file:
            first = file.readline(10 * len(_HEADER))
            if not _HEADER.startswith(first):
                raise self._foreign(first)
            file.seek(0)
            yield from (raw for raw in file if raw.endswith(b"\n"))

    def _foreign(self, first: bytes) -> UserError:
        record, fault = decode_line(first)
        if record is None or fault or record.get("type") != _HISTORY:
            return UserError(
                f"expected a history of vramcast serve at {self._path}, found another kind of file: "
                "choose another --history FILE"
            )
        return UserError(
            f"expected a history of version {_VERSION} at {self._path}, found version {record.get('version')!r}: "
            "install a newer vramcast, or choose another --history FILE"
        )

    def _put_damaged_aside(self) -> None:
        """What was not understood is never thrown away."""
        if self._damaged:
            with self._path.with_name(f"{self._path.name}.damaged").open("ab") as file:
                file.writelines(self._damaged)
                file.flush()
                os.fsync(file.fileno())
            self._damaged = []

    def _write(self, data: bytes) -> None:
        self._unfinished = True
        write_all(self._fd, data)
        os.fsync(self._fd)
        self._end_bytes += len(data)
        self._unfinished = False

    def _settle(self) -> None:
        """Cut off what a failed write left, and finish a renaming; refuse to go on if others changed the file."""
        if self._unfinished:
            os.ftruncate(self._fd, self._end_bytes)
            self._unfinished = False
        if self._unsynced:
            sync(self._path.parent)
            self._unsynced = False
        if not self._is_at_path(self._fd) or os.fstat(self._fd).st_size != self._end_bytes:
            raise OSError(None, "the file was removed or changed by another program")

    def _is_at_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False


def _line(key: bytes, known: ObservedPeak | None) -> bytes:
    if known is None:
        return encode_line(_FORGOTTEN, {"job": key.hex()})
    return encode_line(_KNOWN, {"job": key.hex(), "runs": known.runs, "peak_bytes": known.peak_bytes})


def _change(record: Mapping[str, Any], before: Mapping[bytes, ObservedPeak]) -> Change:
    """What a sound line says; an error where it says something else."""
    kind = record["type"]
    if kind not in (_KNOWN, _FORGOTTEN, _OBSERVED):
        raise ValueError(f"of the type {kind!r}")
    key = bytes.fromhex(record["job"])
    if len(key) != _KEY_BYTES:
        raise ValueError(f"with a job of {len(key)} bytes")
    if kind == _FORGOTTEN:
        return key, None
    found = ObservedPeak(_count(record, "runs"), _count(record, "peak_bytes"))
    return key, found.joined(before.get(key)) if kind == _OBSERVED else found


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record[name]
    if type(value) is not int or not 0 < value < _MOST:
        raise ValueError(f"with {name} of {value!r}")
    return value
