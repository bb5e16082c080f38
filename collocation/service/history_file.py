"""The file of the history: a line for each change, which is on the disk before it is acknowledged.

A line holds the hash of a job and its observed peak, so that the last line of a job counts.
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
from vramcast.dataset_builder.store.lines import decode_line, encode_line
from vramcast.errors import UserError
from vramcast.files.durable import held, replacing, sync, write_all

JobPeak = tuple[bytes, ObservedPeak | None]
"""The key of a job and its observed peak; None if it is forgotten."""

_HISTORY, _VERSION = "history", 1
_HEADER = encode_line(_HISTORY, {"version": _VERSION})
_KNOWN, _FORGOTTEN = "known", "forgotten"
"""Types of lines."""
_KEY_BYTES = 16
_MOST = 2**63
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND
_SPARE = 4
"""Lines per job of the limit; with more, the file is made shorter."""


class NotStoredError(Exception):
    """An observation that may not be on the disk."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"expected to store the observation, found: {reason}; check the disk, and send it again")


class HistoryFile:
    """One file with one writer. `peaks` has its contents when it was opened, the least recently observed first."""

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
                self.peaks, self._lines, self._end_bytes = self._read()
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
            if self._lines > len(self.peaks):
                self.shorten(list(self.peaks.items()))
            self._stack = stack.pop_all()

    @property
    def is_long(self) -> bool:
        """True if the file should be made shorter."""
        return self._lines > _SPARE * self._most_jobs

    def append(self, changes: Sequence[JobPeak]) -> None:
        """Add lines. They are on the disk when this returns; if it fails, none of them is in the file."""
        try:
            self._settle()
            self._write(b"".join(_line(key, peak) for key, peak in changes))
        except OSError as error:
            with suppress(OSError):
                self._settle()
            event("observation not stored", logging.ERROR, path=str(self._path), reason=str(error))
            raise NotStoredError(error.strerror or str(error)) from error
        self._lines += len(changes)

    def shorten(self, peaks: Sequence[tuple[bytes, ObservedPeak]]) -> None:
        """Leave one line per job. If there is no room for a new file, the old one stays."""
        data = _HEADER + b"".join(_line(key, peak) for key, peak in peaks)
        fresh: int | None = None
        try:
            self._settle()
            self._put_damaged_aside()
            with replacing(self._path) as temporary:
                fresh = os.open(temporary, _FLAGS | os.O_TRUNC, 0o666)
                write_all(fresh, data)
        except (UserError, OSError) as error:
            event("history not made shorter", logging.WARNING, path=str(self._path), reason=str(error))
            self._lines = 0  # try again after as many lines
            self._unsynced = True  # it may have failed after the new file took the old one's name
        if fresh is None:
            return
        if not self._is_at_path(fresh):
            os.close(fresh)
            return
        os.close(self._fd)
        self._fd, self._lines, self._end_bytes = fresh, len(peaks), len(data)

    def close(self) -> None:
        """Release the file."""
        self._stack.close()

    def _read(self) -> tuple[OrderedDict[bytes, ObservedPeak], int, int]:
        """Return the observed peaks, the number of lines, and the end of the last whole line."""
        peaks: OrderedDict[bytes, ObservedPeak] = OrderedDict()
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
                key, peak = _change(record)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"expected lines of version {_VERSION} in {self._path}, found another in line {number} "
                    f"({error}): install a newer vramcast, or choose another --history FILE"
                ) from error
            peaks.pop(key, None)
            if peak:
                peaks[key] = peak
            if len(peaks) > self._most_jobs:
                peaks.popitem(last=False)
        return peaks, lines, end_bytes

    def _raw_lines(self) -> Iterator[bytes]:
        """Yield whole lines, the header first; a line that a crash cut short is left out."""
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
        """Keep damaged lines in another file."""
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
        """Remove the rest of a failed write, and finish a renaming; raise if another program changed the file."""
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


def _line(key: bytes, peak: ObservedPeak | None) -> bytes:
    if peak is None:
        return encode_line(_FORGOTTEN, {"job": key.hex()})
    return encode_line(_KNOWN, {"job": key.hex(), "runs": peak.runs, "peak_bytes": peak.peak_bytes})


def _change(record: Mapping[str, Any]) -> JobPeak:
    """Return the contents of a sound line. Raise if it is of another version."""
    kind = record["type"]
    if kind not in (_KNOWN, _FORGOTTEN):
        raise ValueError(f"of the type {kind!r}")
    key = bytes.fromhex(record["job"])
    if len(key) != _KEY_BYTES:
        raise ValueError(f"with a job of {len(key)} bytes")
    if kind == _FORGOTTEN:
        return key, None
    return key, ObservedPeak(_count(record, "runs"), _count(record, "peak_bytes"))


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record[name]
    if type(value) is not int or not 0 < value < _MOST:
        raise ValueError(f"with {name} of {value!r}")
    return value
