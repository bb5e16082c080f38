"""Atomic file replacement, locks and background syncs."""

import os
import platform
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from vramcast.errors import UserError


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes; a single os.write may write only a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` durably if the block succeeds."""
    target = path.resolve()  # so that a symlink stays one
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        sync(temporary)
        temporary.replace(target)
        sync(target.parent)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"expected to write {path}, found: {reason}; make room or choose another path") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory of a build against other builds."""
    with held(directory / "lock", directory, "build", "out=DIR"):
        yield


@contextmanager
def held(lock_path: Path, what: Path, holder: str, setting: str, *, waits: bool = False) -> Iterator[None]:
    """Lock a file or a directory. The kernel releases the lock when the process ends.

    `setting` is the setting in which the user named it, for the error message. With `waits`, another holder is waited
    for, with a line on stderr.
    """
    # Beside the lock, not in it: older releases of filelock truncate the lock file when they try to acquire it.
    owner = lock_path.with_name(f"{lock_path.name}.pid")
    lock = FileLock(lock_path, timeout=0, thread_local=False)
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            other = f"another {holder} ({_read_owner(owner)})"
            if not waits:
                raise UserError(
                    f"expected {what} to be free, found that {other} holds it: "
                    f"wait until it ends, or choose another {setting}"
                ) from error
            print(f"note: {other} is writing to {what}: waiting until it ends", file=sys.stderr, flush=True)
            lock.acquire(timeout=-1)
    except OSError as error:
        raise UserError(f"expected to write at {what}, found: {error.strerror}; choose another {setting}") from error
    try:
        with suppress(OSError):  # only used in the message of a second holder
            owner.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            owner.unlink(missing_ok=True)
        lock.release()


def _read_owner(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "process unknown"
    except (OSError, UnicodeDecodeError):
        return "process unknown"


class BackgroundSync:
    """Syncs a file in a background thread; writes that arrive during one sync share the next.

    A write survives the end of this process immediately, and a crash of the machine after the next sync.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._change = threading.Condition()
        self._written = self._synced = 0
        self._closing = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="journal-sync", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Request a sync of all writes so far; raise the error of an earlier sync."""
        with self._change:
            if self._error:
                raise self._error
            self._written += 1
            self._change.notify_all()

    def close(self) -> None:
        """Wait until everything is synced; raise the error of any sync."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()
        if self._error:
            raise self._error

    def _work(self) -> None:
        while (count := self._next()) is not None:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                with self._change:
                    self._error = error
                return
            self._synced = count

    def _next(self) -> int | None:
        """Return the number of writes to sync, None after the last."""
        with self._change:
            self._change.wait_for(lambda: self._closing or self._written > self._synced)
            return self._written if self._written > self._synced else None
