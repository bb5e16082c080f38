"""File changes of Python code, redirected to a scratch directory: for machines that allow no mount namespace.

Functions of `os` and `open` are replaced by ones that work on `Layers`. Native code is not redirected: Landlock
refuses its changes.
"""

import _io
import builtins
import errno
import functools
import importlib
import io
import os
import posix
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

from vramcast.simulation.sandbox.file_protection.layers import Layers, exists, is_directory
from vramcast.simulation.sandbox.file_protection.renames import check_rename

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_READERS = ("stat", "access", "statvfs", "getxattr", "listxattr", "chdir")
_CHANGERS = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr")
_DESCRIPTOR_CHANGERS = {"fchmod": "chmod", "fchown": "chown"}
"""Functions that take a descriptor, and those that do the same to a path or a descriptor."""
_MAKERS = ("mkdir", "mkfifo", "mknod")
_NAMES = (
    *_READERS, *_CHANGERS, *_DESCRIPTOR_CHANGERS, *_MAKERS, "lstat", "readlink", "lchown", "open", "listdir", "scandir",
    "getcwd", "getcwdb", "unlink", "remove", "rmdir", "rename", "replace", "symlink", "link",
)  # fmt: skip
_NATIVE_MODULES = ("posix", "io", "_io", "builtins")
_OWN = __name__.rpartition(".")[0]
_CHANGE_CONTENT = (posix.truncate, posix.setxattr, posix.removexattr)
"""Functions that need the permission to write; the other changers need the owner."""
_open_file, _open_code = io.open, io.open_code


def redirect(layers: Layers) -> None:
    """Replace the functions of `os` and `open` in this process for good."""
    redirected = _Redirected(layers)
    for name in _READERS:
        _replace(name, redirected.reader(getattr(posix, name), follow=True))
    _replace("lstat", redirected.reader(posix.lstat, follow=False))
    _replace("readlink", redirected.reader(posix.readlink, follow=False))
    for name in _CHANGERS:
        _replace(name, redirected.changer(getattr(posix, name), follow=True))
    _replace("lchown", redirected.changer(posix.lchown, follow=False))
    for name, by_path in _DESCRIPTOR_CHANGERS.items():
        _replace(name, redirected.changer(getattr(posix, by_path), follow=True))
    for name in _MAKERS:
        _replace(name, redirected.maker(getattr(posix, name)))
    for name in ("open", "listdir", "scandir", "getcwd", "unlink", "rmdir", "rename", "symlink", "link"):
        _replace(name, getattr(redirected, name))
    _replace("getcwdb", lambda: os.fsencode(redirected.getcwd()))
    _replace("remove", redirected.unlink)
    _replace("replace", redirected.rename)
    builtins.open = io.open = redirected.open_file
    io.open_code = redirected.open_code
    replaced = {getattr(posix, name): getattr(os, name) for name in _NAMES}
    _replace_imported({_open_file: redirected.open_file, **replaced})
    _redirect_imports(redirected)


def _redirect_imports(redirected: "_Redirected") -> None:
    """Let the import system find modules that the script wrote: it has functions of its own."""
    loader: Any = importlib._bootstrap_external
    loader._os, loader._io = _Os(redirected), _Io(redirected)


class _Os:
    """The module `os` as the import system uses it, which looks at thousands of paths: most need no redirection."""

    def __init__(self, redirected: "_Redirected") -> None:
        self._is_changed = redirected.may_be_changed

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def stat(self, path: Any) -> os.stat_result:
        """Return the status of a path."""
        return os.stat(path) if self._is_changed(path) else posix.stat(path)  # noqa: PTH116

    def listdir(self, path: Any) -> list[Any]:
        """Return the names in a directory."""
        return os.listdir(path) if self._is_changed(path) else posix.listdir(path)  # noqa: PTH208


class _Io:
    """The module `_io` as the import system uses it."""

    def __init__(self, redirected: "_Redirected") -> None:
        self.open_code = redirected.open_code
        self.FileIO = redirected.open_raw

    def __getattr__(self, name: str) -> Any:
        return getattr(_io, name)


def _replace_imported(functions: dict[Any, Any]) -> None:
    """Replace the functions also where modules have imported them before, as tarfile has `open`."""
    for module in list(sys.modules.values()):
        if module is None or module.__name__ in _NATIVE_MODULES or module.__name__.startswith(_OWN):
            continue
        for name, value in list(vars(module).items()):
            if type(value) is BuiltinFunctionType and value in functions:
                setattr(module, name, functions[value])
    closer: Any = getattr(tempfile, "_TemporaryFileCloser", None)  # until Python 3.11
    if closer is not None:
        closer.close.__defaults__ = (os.unlink,)


def _replace(name: str, function: Callable[..., Any]) -> None:
    original = getattr(posix, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    replaced.__module__ = os.__name__  # pickle finds it there
    for group in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in group:
            group.add(replaced)
    setattr(os, name, replaced)


class _Redirected:
    """The functions of `os`, on two layers."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def may_be_changed(self, path: Any) -> bool:
        """Return False where nothing was changed below the first directory of an absolute path."""
        text = os.fsdecode(path)
        end = text.find("/", 1)
        return not text.startswith("/") or end < 0 or self._layers.is_touched(text[:end])

    def reader(self, function: Callable[..., Any], *, follow: bool) -> Callable[..., Any]:
        """Return a function that reads the visible form of a path."""

        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            logical = self._resolve(path, kwargs, follow)
            if logical is None:
                return function(path, *args, **kwargs)
            return self._native(function, path, self._layers.locate(logical), *args, **_without_place(kwargs))

        return call

    def changer(self, function: Callable[..., Any], *, follow: bool) -> Callable[..., Any]:
        """Return a function that changes what exists."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) and function is not posix.truncate:  # which needs a descriptor that may write
                logical = self._layers.of_descriptor(path)
            else:
                logical = self._resolve(path, kwargs, follow)
            if logical is None:
                self._refuse_special(path, kwargs, follow)
                return function(path, *args, **kwargs)
            target = self._layers.locate(logical)
            if exists(target):
                self._check_change(function, target, path)
                target = self._layers.copied_up(logical)
            return self._native(function, path, target, *args, **_without_place(kwargs))

        return call

    def _refuse_special(self, path: Any, kwargs: dict[str, Any], follow: bool) -> None:
        """Raise what users other than root get for a device; a path in /proc/self/fd is a file of the disk."""
        follow = follow and kwargs.get("follow_symlinks", True)
        if self._layers.is_special((path, kwargs.get("dir_fd")), follow=follow):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    def _check_change(self, function: Callable[..., Any], target: str, path: Any) -> None:
        """Raise where the kernel would not let the script change this file of the disk."""
        if function in _CHANGE_CONTENT:
            if not posix.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        elif posix.geteuid() not in (0, posix.lstat(target).st_uid):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    def maker(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes what does not exist."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            logical = self._resolve(path, kwargs, follow=False)
            if logical is None:
                return function(path, *args, **kwargs)
            return self._native(function, path, self._fresh(logical, path), *args, **_without_place(kwargs))

        return call

    def _fresh(self, logical: str, path: Any) -> str:
        """Return where something new is made."""
        if self._layers.exists(logical):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self._layers.copied_up(logical)

    def _resolve(self, path: Any, kwargs: dict[str, Any], follow: bool) -> str | None:
        follow = follow and kwargs.get("follow_symlinks", True)
        return self._layers.resolve((path, kwargs.get("dir_fd")), follow=follow)

    def _native(self, function: Callable[..., Any], path: Any, target: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function with another path, and let its error name the script's."""
        try:
            result = function(target, *args, **kwargs)
        except OSError as error:
            error.filename = path
            raise
        return os.fsencode(result) if isinstance(path, bytes) and isinstance(result, str) else result

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file, its upper form if it may be changed."""
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        logical = self._layers.resolve((path, dir_fd), follow=not (flags & os.O_NOFOLLOW or exclusive))
        if logical is None:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        temporary = flags & os.O_TMPFILE == os.O_TMPFILE
        writes = flags & _WRITE_FLAGS and not temporary
        target = self._target(logical, flags) if writes else self._layers.locate(logical)
        if temporary and self._layers.may_change_parent(f"{logical}/file"):
            self._layers.make_parent(f"{logical}/file")
            target = self._layers.upper(logical)
        descriptor: int = self._native(posix.open, path, target, flags, mode)
        return descriptor

    def _target(self, logical: str, flags: int) -> str:
        located = self._layers.locate(logical)
        if exists(located):
            exclusive = flags & os.O_CREAT and flags & os.O_EXCL
            if exclusive or is_directory(located) or not posix.access(located, os.W_OK):
                return located  # where the kernel refuses it
            return self._layers.copied_up(logical, content=not flags & os.O_TRUNC)
        return self._layers.copied_up(logical) if flags & os.O_CREAT else located

    def open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as `open` does."""
        if isinstance(file, int) or kwargs.get("opener") or len(args) > 5:
            return _open_file(file, mode, *args, **kwargs)
        return _open_file(file, mode, *args, **{**kwargs, "opener": lambda path, flags: self.open(path, flags, 0o666)})

    def open_raw(self, path: Any, mode: str = "r") -> Any:
        """Open a file without a buffer, as `_io.FileIO` does."""
        return _io.FileIO(path, mode, opener=lambda name, flags: self.open(name, flags, 0o666))

    def open_code(self, path: str) -> Any:
        """Open a file of code, as `io.open_code` does."""
        return _open_code(self._layers.native_path(path, writes=False))

    def listdir(self, path: Any = ".") -> list[Any]:
        """Return the names in a directory."""
        logical = self._directory(path)
        if logical is None:
            return posix.listdir(path)
        if not is_directory(self._layers.locate(logical)):
            return self._native(posix.listdir, path, self._layers.locate(logical))  # type: ignore[no-any-return]
        names = self._layers.names(logical)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """Return the entries of a directory."""
        logical = self._directory(path)
        if logical is None:
            return posix.scandir(path)
        if not is_directory(self._layers.locate(logical)):
            return self._native(posix.scandir, path, self._layers.locate(logical))
        as_bytes = isinstance(path, bytes)

        def entries() -> Iterator[Entry]:
            for name in names:
                yield Entry(path, os.fsencode(name) if as_bytes else name, f"{base}/{name}", self._layers)

        names, base = self._layers.names(logical), logical.rstrip("/")
        return Entries(entries())

    def _directory(self, path: Any) -> str | None:
        """Return the logical path of a directory that a path or a descriptor names."""
        path = "." if path is None else path
        return self._layers.resolve((".", path) if isinstance(path, int) else (path, None))

    def getcwd(self) -> str:
        """Return the working directory."""
        return self._layers.logical(posix.getcwd())

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Remove a file."""
        logical = self._layers.resolve((path, dir_fd), follow=False)
        if logical is None:
            posix.unlink(path, dir_fd=dir_fd)
            return
        self._check_parent(logical, path)
        if is_directory(self._layers.locate(logical), follow=False):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._remove(logical, path, posix.unlink)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Remove an empty directory."""
        logical = self._layers.resolve((path, dir_fd), follow=False)
        if logical is None:
            posix.rmdir(path, dir_fd=dir_fd)
            return
        self._check_parent(logical, path)
        if not is_directory(self._layers.locate(logical), follow=False):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._layers.names(logical):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._remove(logical, path, posix.rmdir)

    def _check_parent(self, logical: str, path: Any) -> None:
        """Raise where a path does not exist, or may not be removed from its directory."""
        if not self._layers.exists(logical):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not self._layers.may_change_parent(logical):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _remove(self, logical: str, path: Any, function: Callable[..., Any]) -> None:
        if self._layers.on_disk(logical):
            self._layers.hide(logical)
        if exists(self._layers.upper(logical)):
            function(self._layers.upper(logical))

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Move a file or a directory, over what is there."""
        layers = self._layers
        source = layers.resolve((src, src_dir_fd), follow=False)
        target = layers.resolve((dst, dst_dir_fd), follow=False)
        if source is None or target is None:
            here = src if source is None else self._upper_of_tree(source)
            there = dst if target is None else layers.copied_up(target, content=False)
            posix.rename(here, there)
            if source is not None and layers.on_disk(source):
                layers.hide(source)
            return
        if not layers.exists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
        if source == target:
            return
        check_rename(source, target, src, dst)
        upper = self._upper_of_tree(source)
        layers.make_parent(target)
        posix.rename(upper, layers.upper(target))
        for path in (source, target):
            if layers.on_disk(path):
                layers.hide(path)

    def _upper_of_tree(self, logical: str) -> str:
        """Return the upper form of a file, or of a directory with all that is in it."""
        if is_directory(self._layers.locate(logical), follow=False):
            self._layers.copy_tree_up(logical)
            return self._layers.upper(logical)
        return self._layers.copied_up(logical)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        """Make a symbolic link."""
        logical = self._layers.resolve((dst, dir_fd), follow=False)
        if logical is None:
            posix.symlink(src, dst, dir_fd=dir_fd)
        else:
            posix.symlink(src, self._fresh(logical, dst))

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """Make a hard link, to the upper form of a file."""
        follow = follow_symlinks and (src_dir_fd is not None or dst_dir_fd is not None)  # link(2) follows no link
        source = self._layers.resolve((src, src_dir_fd), follow=follow)
        if source is not None and not self._layers.exists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
        target = self._layers.resolve((dst, dst_dir_fd), follow=False)
        if source is None or target is None:
            posix.link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
            return
        posix.link(self._layers.copied_up(source), self._fresh(target, dst), follow_symlinks=False)


def _without_place(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "dir_fd"}


class Entry:
    """An entry of a directory of two layers, as `os.DirEntry`."""

    def __init__(self, directory: Any, name: Any, logical: str, layers: Layers) -> None:
        self.name = name
        self.path = os.path.join(directory, name) if not isinstance(directory, int) else name  # noqa: PTH118
        self._logical, self._layers = logical, layers

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status of the entry."""
        return os.stat(self._logical) if follow_symlinks else posix.lstat(self._layers.locate(self._logical))  # noqa: PTH116

    def inode(self) -> int:
        """Return the number of its inode."""
        return posix.lstat(self._layers.locate(self._logical)).st_ino

    def _has_kind(self, test: Callable[[int], bool], follow: bool) -> bool:
        try:
            return test(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a directory."""
        return self._has_kind(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a regular file."""
        return self._has_kind(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Return True for a symbolic link."""
        return self._has_kind(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Return False: only Windows has junctions."""
        return False


class Entries:
    """The result of `os.scandir`: an iterator and a context manager."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> "Entries":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())
