"""Two layers of files: the disk, which is only read, and the changes of a script, below a scratch directory.

Marks, one file each, hide a path of the disk and all below it. Layers and marks are on disk, so that forked processes
share them.
"""

import errno
import hashlib
import io
import os
import posix
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

UPPER, MARKS, TEMPORARY = "upper", "marks", "temporary"
_PASSED = ("/dev", "/proc", "/sys")
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
        self.upper_root, self._marks_root = str(scratch / UPPER), str(scratch / MARKS)
        self._marks: set[str] = set()
        self._marks_time = -1

    def upper(self, path: str) -> str:
        """Return where the changed form of a path lies."""
        return self.upper_root + path

    def logical(self, path: str) -> str:
        """Return the path that the script knows for one of either layer."""
        return (path[len(self.upper_root) :] or "/") if f"{path}/".startswith(f"{self.upper_root}/") else path

    def is_passed(self, path: str) -> bool:
        """Return True for a path that is not redirected."""
        return f"{path}/".startswith((*(f"{item}/" for item in _PASSED), f"{self.root}/"))

    def hide(self, path: str) -> None:
        """Hide a path of the disk, and all below it."""
        name = hashlib.sha256(os.fsencode(path)).hexdigest()
        with _open_file(f"{self._marks_root}/{name}", "wb") as file:
            file.write(os.fsencode(path))
        self._marks.add(path)

    def is_hidden(self, path: str) -> bool:
        """Return True where the disk's form of a path is not to be seen."""
        changed = posix.stat(self._marks_root).st_mtime_ns
        if changed != self._marks_time:
            self._marks = set(read_marks(self._marks_root))
            self._marks_time = changed
        while self._marks and path != "/":
            if path in self._marks:
                return True
            path = os.path.dirname(path)  # noqa: PTH120 - strings, for speed
        return False

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
        path, directory = place
        if isinstance(path, int):
            return None
        text = os.fsdecode(os.fspath(path))
        if not text:
            return None
        if directory is not None and not text.startswith("/") and not stat.S_ISDIR(posix.fstat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        base = self.logical(posix.readlink(f"/proc/self/fd/{directory}") if directory is not None else posix.getcwd())
        resolved = self._walk(base if not text.startswith("/") else "/", text, follow)
        return None if self.is_passed(resolved) else resolved

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
            for name in posix.listdir(path):
                if name not in names and not self.is_hidden(f"{path.rstrip('/')}/{name}"):
                    names[name] = None
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
            with _writable_parent(upper):
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
                _copy(path, upper, content)
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
        self._make_upper(path)
        for name in self.names(path):
            child = f"{path}/{name}"
            if is_directory(self.locate(child), follow=False):
                self.copy_tree_up(child)
            else:
                self.copied_up(child)


def read_marks(directory: str) -> Iterator[str]:
    """Yield the hidden paths."""
    for name in posix.listdir(directory):
        with _open_file(f"{directory}/{name}", "rb") as file:
            yield os.fsdecode(file.read())


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


def _copy(source: str, target: str, content: bool) -> None:
    status = posix.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        posix.symlink(posix.readlink(source), target)
        return
    if not stat.S_ISREG(status.st_mode):
        posix.mkfifo(target, stat.S_IMODE(status.st_mode))
        return
    with _open_file(target, "wb") as written:
        if content:
            with _open_file(source, "rb") as read:
                offset = 0
                while count := posix.sendfile(written.fileno(), read.fileno(), offset, 2**30):
                    offset += count
    with suppress(PermissionError):
        posix.chown(target, status.st_uid, status.st_gid)
    posix.chmod(target, stat.S_IMODE(status.st_mode))
    posix.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
