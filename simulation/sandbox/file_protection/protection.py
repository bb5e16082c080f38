"""Protection of files from the code that a child process runs: the code's changes go to a scratch directory.

The supervisor makes a `FileProtection` before it forks the worker. The worker calls `enter`, the supervisor, which
stays outside, calls `finish` when the worker has ended.
"""

import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vramcast.errors import UserError
from vramcast.simulation.sandbox.file_protection import kernel, overlay
from vramcast.simulation.sandbox.file_protection.changes import Changes, Layer, changed_files, copy_out
from vramcast.simulation.sandbox.file_protection.layers import HIDDEN, PARTS, TEMPORARY, UPPER, Layers, hidden_paths
from vramcast.simulation.sandbox.file_protection.redirect import redirect
from vramcast.simulation.sandbox.file_protection.renames import rename_by_copying

OVERLAY, REDIRECT, NONE = "overlay", "redirect", "none"
FORCED = "VRAMCAST_PROTECTION"
"""The environment variable that names the only way to be tried."""
_PREFIX, _LOCK, _MOVED = "vramcast-files-", "lock", "moved"
_MOST_DESCRIPTORS = 2
_FRESH_SECONDS = 60
"""A younger scratch directory may be without its lock yet."""
_LASTING = Path("/var/tmp")  # noqa: S108 - mkdtemp makes a private directory in it
"""Where scratch directories are, if it can be written."""
_DEVICES = ("null", "zero", "full", "tty", "ptmx", "pts", "shm", "fd", "urandom", "random")


@dataclass(frozen=True)
class Keep:
    """Files that are copied to the disk when the code has ended."""

    new_files: bool = False
    """All that did not exist before."""
    downloads: bool = False
    """New files in the caches of downloads, where the code may reach the network."""
    paths: tuple[Path, ...] = ()
    """Files that the user asked for, such as a snapshot; they replace what is there."""


_CACHE_VARIABLES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME")


def _caches() -> list[Path]:
    """Return the directories that libraries download to, without links."""
    named = [Path(os.environ[name]) for name in _CACHE_VARIABLES if os.environ.get(name)]
    home = os.environ.get("HOME")
    return [path.resolve() for path in (*named, *([Path(home, ".cache")] if home else []))]


class FileProtection:
    """A scratch directory, and the way in which the changes of a worker get there.

    Raises:
        UserError: No scratch directory can be made.
    """

    def __init__(self, keep: Keep | None = None, *, wanted: bool = True) -> None:
        self._keep = keep or Keep()
        self._wanted = wanted
        self._ours, self._theirs = socket.socketpair()
        self._scratch: Path | None = None
        self.way = NONE
        """How the files are protected, once the worker has entered."""
        self.native_path: Callable[..., Any] | None = None
        """Returns where native code finds a path, if not where it is named."""
        if wanted:
            self._scratch, self._lock = _new_scratch()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the supervisor needs until `finish`."""
        return (self._ours.fileno(), *((self._lock.fileno(),) if self._scratch else ()))

    def enter(self) -> None:
        """Protect the files from this process and its children.

        Raises:
            UserError: The machine offers no way.
        """
        self._ours.close()
        try:
            self.way = self._enter()
        finally:
            self._theirs.close()

    def _enter(self) -> str:
        if self._scratch is None:
            return NONE
        self._lock.close()
        forced = os.environ.get(FORCED)
        if forced in (None, OVERLAY) and overlay.works(self._scratch):
            memory, covers = overlay.enter(self._scratch)
            items = [[str(item.path), item.name, item.in_memory] for item in covers]
            self._tell({"way": OVERLAY, "covers": items}, memory)
            os.close(memory)
            rename_by_copying({item.path: item.device for item in covers})
            return OVERLAY
        if forced in (None, REDIRECT) and kernel.can_refuse_writes():
            for name in (UPPER, PARTS, TEMPORARY):
                (self._scratch / name).mkdir()
            self._tell({"way": REDIRECT})
            tempfile.tempdir = os.environ["TMPDIR"] = str(self._scratch / TEMPORARY)
            kernel.refuse_writes([self._scratch, *(Path("/dev", name) for name in _DEVICES), Path("/proc")])
            layers = Layers(self._scratch)
            self.native_path = layers.native_path
            redirect(layers)
            return REDIRECT
        raise UserError(
            "expected a machine on which files can be protected from the code (a mount namespace with overlayfs, or "
            "Linux 6.2 with Landlock), found none: use another machine, or let the code change files by --unprotected"
        )

    def _tell(self, message: dict[str, Any], *descriptors: int) -> None:
        """Send a message of any length, in a file in memory, and descriptors."""
        with os.fdopen(os.memfd_create("message"), "wb") as file:
            file.write(json.dumps(message).encode())
            file.flush()
            socket.send_fds(self._theirs, [b"."], [file.fileno(), *descriptors])

    def finish(self) -> Changes:
        """Return the changes of the worker, copy what is to stay, and remove the scratch directory."""
        if self._scratch is None:
            return Changes(NONE)
        try:
            return self._collect(self._scratch)
        finally:
            self.remove()

    def listen(self) -> None:
        """Wait until the worker has entered the protection, or has ended; the supervisor has closed all other files."""
        self._theirs.detach()
        self._message: dict[str, Any] = {"way": NONE}
        self._memory: list[int] = []
        if self._scratch is not None:
            _, descriptors, _, _ = socket.recv_fds(self._ours, 1, _MOST_DESCRIPTORS)
            if descriptors:
                message, *self._memory = descriptors
                self._message = json.loads(Path(f"/proc/self/fd/{message}").read_bytes())
                os.close(message)

    def remove(self) -> None:
        """Remove the scratch directory."""
        if self._scratch is not None:
            _remove_tree(self._scratch)

    def _collect(self, scratch: Path) -> Changes:
        way = self._message["way"]
        if way == OVERLAY:
            memory = Path(f"/proc/self/fd/{self._memory[0]}")
            layers = [
                Layer(Path(path), (memory if in_memory else scratch) / f"{overlay.COVERS}-{name}" / "upper")
                for path, name, in_memory in self._message["covers"]
            ]
        else:
            layers = [Layer(Path("/"), scratch / UPPER)]
        written, deleted = changed_files(layers)
        if way == REDIRECT:
            deleted += [
                path
                for path in map(Path, sorted(hidden_paths(str(scratch / HIDDEN))))
                if os.path.lexists(path) and not os.path.lexists(f"{scratch / UPPER}{path}")
            ]
        asked_for = set(self._keep.paths)
        copied, lost = self._copied(written)
        return Changes(
            way,
            tuple(str(item.path) for item in written if item.path not in asked_for),
            tuple(map(str, deleted)),
            tuple(copied),
            tuple(lost),
        )

    def _copied(self, written: Iterable[Layer]) -> tuple[list[str], list[str]]:
        copied: list[str] = []
        lost: list[str] = []
        caches = _caches() if self._keep.downloads else []
        for item in written:
            asked_for = item.path in self._keep.paths
            stays = self._keep.new_files or any(map(item.path.is_relative_to, caches))
            if not asked_for and (not stays or os.path.lexists(item.path)):
                continue
            try:
                if copy_out(item, replace=asked_for) and not asked_for:
                    copied.append(str(item.path))
            except OSError as error:
                lost.append(f"{item.path}: {error.strerror}")
        return copied, lost


def _new_scratch() -> tuple[Path, BinaryIO]:
    """Make a scratch directory on disk, where the changes may be large, and lock it.

    Raises:
        UserError: The disk is full, or no directory for it can be written.
    """
    reasons = []
    for directory in dict.fromkeys([_LASTING, Path(tempfile.gettempdir()).resolve()]):
        try:
            _remove_stale(directory)
            scratch = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
            lock = (scratch / _LOCK).open("wb")
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return scratch, lock
    raise UserError(
        "expected a directory for the file changes of the code, found none that can be written "
        f"({'; '.join(reasons)}): set TMPDIR to one on a disk with space"
    )


def _remove_stale(directory: Path) -> None:
    """Remove scratch directories of this user whose supervisor was killed."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _FRESH_SECONDS:
                continue
            if not (path / _LOCK).exists():  # killed before it was made
                _remove_tree(path)
                continue
            with (path / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_tree(path)


def _remove_tree(top: Path) -> None:
    """Remove a scratch directory, however deep, also what the code or overlayfs made unreadable, and its lock last.

    Sub-directories move to the top before their turn comes, so that no path becomes long.
    """
    directories, moved, lock = [top], 0, str(top / _LOCK)
    while directories:
        directory = directories.pop()
        with suppress(OSError):
            directory.chmod(stat.S_IRWXU)
            for entry in os.scandir(directory):
                if entry.path == lock:
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    with suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108
                elif directory == top:
                    directories.append(Path(entry.path))
                else:
                    moved += 1
                    target = top / f"{_MOVED}-{moved}"
                    os.chmod(entry.path, stat.S_IRWXU)  # noqa: PTH101 - to be moved
                    os.rename(entry.path, target)  # noqa: PTH104
                    directories.append(target)
            if directory != top:
                directory.rmdir()
    with suppress(OSError):
        if [entry.path for entry in os.scandir(top)] == [lock]:
            os.unlink(lock)  # noqa: PTH108
        top.rmdir()
