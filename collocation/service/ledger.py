"""The file of what jobs were seen to take: a line for each observation, on the disk before anybody is told.

A line holds the job's hash and no more of it. Lines of one job add up, so a file is made shorter by joining them.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from collocation.history import Observed
from collocation.service.logs import event
from dataset_builder.errors import UserError
from dataset_builder.store.durable import held, replacing, sync, write_all
from dataset_builder.store.lines import decode_line, encode_line

_HEADER = encode_line("history", {"version": 1})
_SPARE = 4
"""Lines for each job that may be kept; with more the file is made shorter."""


class NotStoredError(Exception):
    """An observation that is not on the disk."""


class Ledger:
    """One file with one writer. What it has when it is opened is in `found`, least recently observed first."""

    def __init__(self, path: Path, most_jobs: int) -> None:
        self._path = path.resolve()  # two links to one file are one file
        self._most_jobs = most_jobs
        self._unfinished = False
        with ExitStack() as stack:
            lock = self._path.with_name(f"{self._path.name}.lock")
            stack.enter_context(held(lock, self._path, "service", "--history FILE"))
            try:
                self._fd = self._opened()
                stack.callback(lambda: os.close(self._fd))
                self.found, self._lines, self._end_bytes, damaged = self._read()
                os.ftruncate(self._fd, self._end_bytes)
                if self._end_bytes == 0:
                    self._write(_HEADER)
                sync(self._path.parent)
            except OSError as error:
                raise UserError(
                    f"expected to write {self._path}, found: {error.strerror}; choose another --history FILE"
                ) from error
            if damaged:
                event("lines of the history left out", logging.WARNING, path=str(self._path), lines=damaged)
            if self._lines > len(self.found):
                self._shorten()
            self._stack = stack.pop_all()

    def append(self, observations: Sequence[tuple[bytes, Observed]]) -> None:
        """Add lines; they are on the disk when this returns, and none of them is in the file where it fails."""
        try:
            self._settle()
            self._write(b"".join(_line(key, item) for key, item in observations))
        except OSError as error:
            with suppress(OSError):
                self._settle()
            event("observation not stored", logging.ERROR, path=str(self._path), reason=str(error))
            raise NotStoredError(error.strerror or str(error)) from error
        self._lines += len(observations)
        if self._lines > _SPARE * self._most_jobs:
            self._shorten()

    def close(self) -> None:
        """Let another have the file."""
        self._stack.close()

    def _opened(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def _read(self) -> tuple[OrderedDict[bytes, Observed], int, int, int]:
        """What the file says, in how many lines, where the last whole one ends, and how many of them are damaged."""
        found: OrderedDict[bytes, Observed] = OrderedDict()
        lines = damaged = end_bytes = 0
        for raw in self._raw_lines():
            end_bytes += len(raw)
            if raw == _HEADER:
                continue
            lines += 1
            record, fault = decode_line(raw)
            if record is None or fault:
                damaged += 1
                continue
            key = bytes.fromhex(record["job"])
            found[key] = Observed(record["runs"], record["peak_bytes"]).joined(found.pop(key, None))
            if len(found) > self._most_jobs:
                found.popitem(last=False)
        return found, lines, end_bytes, damaged

    def _raw_lines(self) -> Iterator[bytes]:
        """Whole lines, the header first; one that a crash had cut short is no line."""
        with self._path.open("rb") as file:
            if not _HEADER.startswith(file.read(len(_HEADER))):
                raise UserError(
                    f"expected a history of vramcast serve at {self._path}, found another kind of file: "
                    "choose another --history FILE"
                )
            file.seek(0)
            yield from (raw for raw in file if raw.endswith(b"\n"))

    def _write(self, data: bytes) -> None:
        self._unfinished = True
        write_all(self._fd, data)
        os.fsync(self._fd)
        self._end_bytes += len(data)
        self._unfinished = False

    def _settle(self) -> None:
        """Cut off what a failed write left; refuse to go on if others changed the file."""
        if self._unfinished:
            os.ftruncate(self._fd, self._end_bytes)
            self._unfinished = False
        there = os.fstat(self._fd)
        if there.st_nlink == 0 or there.st_size != self._end_bytes:
            raise OSError(None, "the file was removed or changed by another program")

    def _shorten(self) -> None:
        """A line for each job that is kept. Where there is no room for that, the file stays as it is."""
        try:
            found, *_ = self._read()
            with replacing(self._path) as temporary:
                temporary.write_bytes(_HEADER + b"".join(_line(key, item) for key, item in found.items()))
            fresh = self._opened()
        except (UserError, OSError) as error:
            event("history not made shorter", logging.WARNING, path=str(self._path), reason=str(error))
            self._lines = 0  # as many more, and it is tried again
            return
        os.close(self._fd)
        self._fd, self._lines = fresh, len(found)
        self._end_bytes = os.fstat(fresh).st_size


def _line(key: bytes, observed: Observed) -> bytes:
    return encode_line("observed", {"job": key.hex(), "runs": observed.runs, "peak_bytes": observed.peak_bytes})
