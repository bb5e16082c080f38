"""Two layers of files: the disk, which is only read, and the changes of a script, below a scratch directory.

A log of hidden paths says what of the disk is not to be seen. Layers and log are on disk, so that forked processes
share them.
"""

import errno
import fcntl
import io
import os
import posix
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

UPPER, HIDDEN, PARTS, TEMPORARY = "upper", "hidden", "parts", "temporary"
_PASSED = ("/dev", "/proc", "/sys")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - people keep data sets there
_FICLONE = 0x40049409  # linux/fs.h
_MOST_LINKS = 40
_open_file = io.open
Place = tuple[Any, int | None]
"""A path or a descriptor, and the descriptor of the directory that it is relative to."""


class Layers:
    """The two layers of the file system that a process sees.

    Paths are logical: absolute, without links in their directories. `upper` and the disk are where they may lie.
    """

    def __init__(self, scratch: Path) -> None:
        self.root = str(scratch)
        self.upper_root, self._log = str(scratch / UPPER), str(scratch / HIDDEN)
        self._hidden: set[str] = set()
        self._read_bytes = 0
        """Of the log."""

    def upper(self, path: str) -> str:
        """Return where the changed form of a path lies."""
        return self.upper_root + path

    def logical(self, path: str) -> str:
        """Return the path that the script knows for one of either layer."""
        return (path[len(self.upper_root) :] or "/") if f"{path}/".startswith(f"{self.upper_root}/") else path

    def is_passed(self, path: str) -> bool:
        """Return True for a path that is not redirected."""
        if f"{path}/".startswith(f"{_SHARED_MEMORY}/"):
            return False
        return f"{path}/".startswith((*(f"{item}/" for item in _PASSED), f"{self.root}/"))

    def hide(self, path: str) -> None:
        """Hide a path of the disk, and all below it."""
        self.make_parent(path)  # so that `is_touched` sees it
        descriptor = posix.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            posix.write(descriptor, os.fsencode(path) + b"\0")
        finally:
            posix.close(descriptor)

    def is_hidden(self, path: str) -> bool:
        """Return True where the disk's form of a path is not to be seen."""
        self._read_log()
        while self._hidden and path != "/":
            if path in self._hidden:
                return True
            path = os.path.dirname(path)  # noqa: PTH120 - strings, for speed
        return False

    def is_touched(self, path: str) -> bool:
        """Return True where a path, or one below it, may have changed."""
        return exists(self.upper(path)) or self.is_hidden(path)

    def _read_log(self) -> None:
        try:
            size_bytes = posix.stat(self._log).st_size
        except FileNotFoundError:
            return
        if size_bytes > self._read_bytes:
            self._hidden |= hidden_paths(self._log, self._read_bytes)
            self._read_bytes = size_bytes

    def locate(self, path: str) -> str:
        """Return where the visible form of a path lies; a place with nothing where there is none."""
        upper = self.upper(path)
        return upper if exists(upper) or self.is_hidden(path) else path

    def exists(self, path: str) -> bool:
        """Return True where a path is visible."""
        return exists(self.locate(path))

    def on_disk(self, path: str) -> bool:
        """Return True where the disk has a form of the path that is not hidden."""
        return not self.is_hidden(path) and exists(path)

    def resolve(self, place: Place, *, follow: bool = True) -> str | None:
        """Return the logical path, with links followed; None for what is not redirected."""
        resolved = self._resolved(place, follow)
        return None if resolved is None or self.is_passed(resolved) else resolved

    def is_special(self, place: Place, *, follow: bool = True) -> bool:
        """Return True for a path or a descriptor in /dev, /proc or /sys: a change there reaches the machine."""
        path = place[0]
        resolved = posix.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else self._resolved(place, follow)
        return resolved is not None and self.is_passed(resolved) and not f"{resolved}/".startswith(f"{self.root}/")

    def _resolved(self, place: Place, follow: bool) -> str | None:
        path, directory = place
        if isinstance(path, int):
            return None
        text = os.fsdecode(os.fspath(path))
        if not text:
            return None
        if directory is not None and not text.startswith("/") and not stat.S_ISDIR(posix.fstat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        base = self.logical(posix.readlink(f"/proc/self/fd/{directory}") if directory is not None else posix.getcwd())
        return self._walk(base if not text.startswith("/") else "/", text, follow)

    def native_path(self, path: Any, *, writes: bool) -> Any:
        """Return where native code finds a path, and may write it if asked."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path
        logical = self.resolve((path, None))
        if logical is None:
            return path
        located = self.copied_up(logical) if writes else self.locate(logical)
        return os.fsencode(located) if isinstance(os.fspath(path), bytes) else located

    def of_descriptor(self, descriptor: int) -> str | None:
        """Return the path of a file of the disk that is open; None for all others, which are used as they are."""
        path = posix.readlink(f"/proc/self/fd/{descriptor}")
        status = posix.fstat(descriptor)
        is_file = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if not is_file or not status.st_nlink or self.is_passed(path):
            return None
        if not os.path.samestat(posix.stat(path), status):  # renamed on the disk since
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), descriptor)
        return path

    def _walk(self, base: str, text: str, follow: bool) -> str:
        names = [name for name in text.split("/") if name not in ("", ".")][::-1]
        links = 0
        while names:
            name = names.pop()
            if name == "..":
                base = os.path.dirname(base)  # noqa: PTH120
                continue
            child = f"{base.rstrip('/')}/{name}"
            kind = 0 if self.is_passed(child) else self._kind_at(child, text)
            if not stat.S_ISLNK(kind) or not (names or follow or text.endswith("/")):
                if names and kind and not stat.S_ISDIR(kind):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), text)
                base = child
                continue
            target = posix.readlink(self.locate(child))
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
            base = "/" if target.startswith("/") else base
            names += [item for item in target.split("/") if item not in ("", ".")][::-1]
        return base

    def _kind_at(self, path: str, text: str) -> int:
        try:
            return posix.lstat(self.locate(path)).st_mode
        except PermissionError as error:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text) from error
        except (OSError, ValueError):
            return 0

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, of both layers."""
        names = dict.fromkeys(posix.listdir(self.upper(path))) if exists(self.upper(path)) else {}
        if self.on_disk(path):
            base = path.rstrip("/")
            names |= dict.fromkeys(name for name in posix.listdir(path) if f"{base}/{name}" not in self._hidden)
        elif not names:
            return posix.listdir(self.locate(path))
        return list(names)

    def may_change_parent(self, path: str) -> bool:
        """Return True where the script may make and remove entries beside a path."""
        located = self.locate(os.path.dirname(path))  # noqa: PTH120
        return is_directory(located) and posix.access(located, os.W_OK | os.X_OK)

    def make_parent(self, path: str) -> None:
        """Make the upper form of the parent of a path."""
        self._make_upper(os.path.dirname(path))  # noqa: PTH120

    def _make_upper(self, path: str) -> None:
        upper = self.upper(path)
        if not exists(upper):
            if path != "/":
                self.make_parent(path)
            with _writable_parent(upper), suppress(FileExistsError):  # another process or thread was faster
                posix.mkdir(upper, 0o700)
            if exists(path):
                posix.chmod(upper, stat.S_IMODE(posix.stat(path).st_mode))

    def copied_up(self, path: str, *, content: bool = True) -> str:
        """Return where a path may be changed: its upper form, made from the disk's where there is none."""
        upper = self.upper(path)
        if exists(upper):
            return upper
        if self.on_disk(path):
            mode = posix.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                self._make_upper(path)
                return upper
            self.make_parent(path)
            with _writable_parent(upper):
                self._copy(path, upper, content)
            return upper
        if not self.may_change_parent(path):
            return self._refused(path)
        self.make_parent(path)
        return upper

    def _refused(self, path: str) -> str:
        """Return a place at which the kernel gives the error that the script would see."""
        parent = os.path.dirname(path)  # noqa: PTH120
        return path if self.locate(parent) == parent else self.upper(path)

    def copy_tree_up(self, path: str) -> None:
        """Copy a directory and all that is visible in it to the upper layer."""
        directories = [path]
        while directories:
            directory = directories.pop()
            self._make_upper(directory)
            for name in self.names(directory):
                child = f"{directory}/{name}"
                if is_directory(self.locate(child), follow=False):
                    directories.append(child)
                else:
                    self.copied_up(child)

    def _copy(self, source: str, target: str, content: bool) -> None:
        """Copy an entry of the disk; nobody sees a part of it."""
        part = f"{self.root}/{PARTS}/{posix.getpid()}-{threading.get_ident()}"
        try:
            with suppress(FileExistsError):
                _copy_entry(source, part, content)
                posix.link(part, target, follow_symlinks=False)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} (for the copy that the script may change)", source) from error
        finally:
            with suppress(FileNotFoundError):
                posix.unlink(part)


def hidden_paths(log: str, start: int = 0) -> set[str]:
    """Return the paths in a log, from a byte on."""
    if not exists(log):
        return set()
    with _open_file(log, "rb") as file:
        file.seek(start)
        return {os.fsdecode(path) for path in file.read().split(b"\0") if path}


def exists(path: str) -> bool:
    """Return True where a path of one layer exists, also as a link to nothing."""
    return _kind(path) != 0


def is_directory(path: str, *, follow: bool = True) -> bool:
    """Return True where a path of one layer is a directory."""
    try:
        return stat.S_ISDIR((posix.stat if follow else posix.lstat)(path).st_mode)
    except (OSError, ValueError):
        return False


def _kind(path: str) -> int:
    """Return the mode of a path of one layer, links not followed; 0 where there is nothing."""
    try:
        return posix.lstat(path).st_mode
    except PermissionError:  # in a directory that cannot be searched: the kernel says so when the path is used
        return stat.S_IFDIR
    except (OSError, ValueError):
        return 0


@contextmanager
def _writable_parent(upper: str) -> Iterator[None]:
    """Let the entry of a directory that the script may not write be copied."""
    parent = os.path.dirname(upper)  # noqa: PTH120
    if posix.access(parent, os.W_OK | os.X_OK):
        yield
        return
    mode = stat.S_IMODE(posix.stat(parent).st_mode)
    posix.chmod(parent, mode | stat.S_IRWXU)
    try:
        yield
    finally:
        posix.chmod(parent, mode)


def _copy_entry(source: str, target: str, content: bool) -> None:
    status = posix.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        posix.symlink(posix.readlink(source), target)
        return
    if not stat.S_ISREG(status.st_mode):
        posix.mkfifo(target, stat.S_IMODE(status.st_mode))
        return
    with _open_file(source, "rb") if content else nullcontext() as read, _open_file(target, "wb") as written:
        if read is not None:
            _copy_content(read.fileno(), written.fileno(), status.st_size)
    with suppress(OSError):  # another user's or group's
        posix.chown(target, status.st_uid, status.st_gid)
    with suppress(OSError):
        for name in posix.listxattr(source):
            posix.setxattr(target, name, posix.getxattr(source, name))
    posix.chmod(target, stat.S_IMODE(status.st_mode))
    posix.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_content(source: int, target: int, size_bytes: int) -> None:
    """Share the blocks of a file where the file system can, else copy them, without its holes."""
    with suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return
    posix.ftruncate(target, size_bytes)
    end = 0
    while end < size_bytes:
        try:
            start = posix.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        end = posix.lseek(source, start, os.SEEK_HOLE)
        posix.lseek(target, start, os.SEEK_SET)
        while start < end:
            start += posix.sendfile(target, source, start, end - start)
