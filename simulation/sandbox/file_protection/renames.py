"""Renames that a protection has to carry out by copying, with the errors of rename(2)."""

import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def check_rename(source: str, target: str, src: Any, dst: Any) -> None:
    """Raise what the kernel raises for a rename of one absolute path, which exists, to another."""
    number = _refusal(source, target)
    if number:
        raise OSError(number, os.strerror(number), src, None, dst)


def _refusal(source: str, target: str) -> int:
    """Return the number of the error, in the order in which vfs_rename of Linux checks."""
    parents = [os.path.dirname(path) for path in (source, target)]  # noqa: PTH120
    moves_directory, over_directory = _is_directory(source), _is_directory(target)
    checks: tuple[tuple[int, Callable[[], bool]], ...] = (
        (errno.ENOENT, lambda: not os.path.isdir(parents[1])),  # noqa: PTH112
        (errno.EINVAL, lambda: f"{target}/".startswith(f"{source}/")),
        (errno.ENOTEMPTY, lambda: f"{source}/".startswith(f"{target}/")),
        (errno.EACCES, lambda: not all(os.access(parent, os.W_OK | os.X_OK) for parent in parents)),
        (errno.ENOTDIR, lambda: moves_directory and not over_directory and os.path.lexists(target)),
        (errno.EISDIR, lambda: over_directory and not moves_directory),
        (errno.EACCES, lambda: moves_directory and parents[0] != parents[1] and not os.access(source, os.W_OK)),
        (errno.ENOTEMPTY, lambda: over_directory and bool(os.listdir(target))),  # noqa: PTH208
    )
    return next((number for number, applies in checks if applies()), 0)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


def rename_by_copying(devices: dict[Path, int]) -> None:
    """Let `os.rename` and `os.replace` copy where overlayfs refuses a rename that the disk would allow.

    It refuses to move a directory that it did not make, without privileges, and a file from one cover to another.

    Args:
        devices: The directories that are covered, and the numbers of the file systems that they lie on.
    """
    os.rename = _copying(os.rename, devices)
    os.replace = _copying(os.replace, devices)


def _copying(original: Callable[..., None], devices: dict[Path, int]) -> Callable[..., None]:
    @functools.wraps(original)
    def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        try:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
            if error.errno != errno.EXDEV or _device(source, devices) != _device(target, devices):
                raise
            check_rename(source, target, src, dst)
            _move(original, source, target)

    for group in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in group:
            group.add(rename)
    return rename


def _absolute(path: Any, directory: int | None) -> str:
    """Return the path with the links of its directories followed."""
    text = os.fsdecode(path).rstrip("/")
    if directory is not None:
        text = os.path.join(f"/proc/self/fd/{directory}", text)  # noqa: PTH118
    parent, name = os.path.split(text)
    return os.path.join(os.path.realpath(parent), name)  # noqa: PTH118


def _device(path: str, devices: dict[Path, int]) -> int | None:
    return next((devices[item] for item in Path(path).parents if item in devices), None)


def _move(original: Callable[..., None], source: str, target: str) -> None:
    """Copy beside the target, let the copy take its place, and remove the source."""
    parent = tempfile.mkdtemp(prefix=".vramcast-", dir=os.path.dirname(target))  # noqa: PTH120
    try:
        copy = f"{parent}/copy"
        if _is_directory(source):
            shutil.copytree(source, copy, symlinks=True)
            original(copy, target)
            shutil.rmtree(source)
        else:
            shutil.copy2(source, copy, follow_symlinks=False)
            original(copy, target)
            os.unlink(source)  # noqa: PTH108
    finally:
        with suppress(OSError):
            shutil.rmtree(parent)
