"""Files that survive a crash: written whole or not at all, and one writer to a directory."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dataset_builder.errors import UserError


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, onto the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: one call of os.write may write a part only."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path that takes the place of `path`, durably, if the block ends well."""
    target = path.resolve()  # a link stays a link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
        sync(target.parent)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"expected to write {path}, found: {reason}; make room or choose another path"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory against other builds. The kernel frees it when the process dies, however it dies."""
    # Beside the lock, not in it: older releases of filelock empty the lock file when they try for it.
    owner = directory / "lock.pid"
    lock = FileLock(directory / "lock", timeout=0, thread_local=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"expected {directory} to be free, found that another build ({_read_owner(owner)}) holds it: "
            "wait for its end, or choose another out=DIR"
        ) from error
    except OSError as error:
        raise UserError(
            f"expected a directory to write at {directory}, found: {error.strerror}; choose another out=DIR"
        ) from error
    try:
        with suppress(OSError):  # it only makes the message of a second build richer
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
