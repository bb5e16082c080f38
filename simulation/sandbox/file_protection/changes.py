"""The file changes of a script: what it would have written and deleted, and the copies of what is to stay."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramcast.virtual_gpu.cuda.hollow_files import MARK

_MOST = 1_000
_PIECE_BYTES = 2**20
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


@dataclass(frozen=True)
class Changes:
    """The paths that a script changed in its view of the files; the disk has none of the changes but the copies."""

    protection: str
    """How the files were protected: 'overlay', 'redirect' or 'none'."""
    written: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    """New files that were copied to the disk."""
    lost: tuple[str, ...] = ()
    """Files that were to be copied, and the reasons why they could not be."""
    left_out: dict[str, int] = field(default_factory=dict)
    """How many paths `to_json` has left out of each list."""

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads back; long lists are cut."""
        lists = {name: value for name, value in vars(self).items() if isinstance(value, tuple)}
        left_out = {name: len(value) - _MOST for name, value in lists.items() if len(value) > _MOST}
        cut = {name: list(value[:_MOST]) for name, value in lists.items()}
        return {"protection": self.protection, **cut, "left_out": left_out or self.left_out}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Changes":
        """Read changes as `to_json` wrote them."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**read)

    def count(self, name: str) -> int:
        """Return how many paths there are in a list, with those that are left out."""
        return len(getattr(self, name)) + self.left_out.get(name, 0)


@dataclass(frozen=True)
class Layer:
    """A directory of the disk, and one with its changed entries."""

    path: Path
    upper: Path


def changed_files(layers: Iterable[Layer]) -> tuple[list[Layer], list[Path]]:
    """Return the changed files, each as a layer, and the deleted paths of upper directories made by overlayfs."""
    written: list[Layer] = []
    deleted: list[Path] = []
    directories = list(layers)
    for layer in directories:  # which grows
        for entry in _entries(layer.upper):
            item = Layer(layer.path / entry.name, layer.upper / entry.name)
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # a whiteout
                deleted.append(item.path)
            elif stat.S_ISDIR(status.st_mode):
                if _is_opaque(item.upper):
                    deleted += _hidden_by(item)
                directories.append(item)
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                written.append(item)
    return written, deleted


def _entries(directory: Path) -> Iterator["os.DirEntry[str]"]:
    with suppress(OSError), os.scandir(directory) as entries:
        yield from sorted(entries, key=lambda item: item.name)


def _is_opaque(directory: Path) -> bool:
    for name in _OPAQUE:
        with suppress(OSError):
            if os.getxattr(directory, name) == b"y":
                return True
    return False


def _hidden_by(layer: Layer) -> Iterator[Path]:
    """Yield the entries of the disk that a directory made anew does not have."""
    for entry in _entries(layer.path):
        if not os.path.lexists(layer.upper / entry.name):
            yield layer.path / entry.name


def copy_out(item: Layer, *, replace: bool = False) -> bool:
    """Copy a file to the disk, with the directories above it; return False for one whose tensors have no data.

    Raises:
        OSError: The disk does not take it. What was there before is as it was.
    """
    parent = item.path.parent
    parent.mkdir(parents=True, exist_ok=True)
    if parent.resolve() != parent:
        raise OSError(errno.ELOOP, "the disk has a link where the script made a directory")
    if item.upper.is_symlink():
        item.path.symlink_to(item.upper.readlink())
        return True
    part = item.path.with_name(f".{item.path.name[:200]}.{os.getpid()}.part")
    try:
        with item.upper.open("rb") as source, part.open("xb") as target:
            if not _copy_unless_hollow(source, target):
                return False
        part.chmod(stat.S_IMODE(item.upper.stat().st_mode))
        if replace:
            part.replace(item.path)
        else:
            os.link(part, item.path)  # fails where a file came to be meanwhile
        return True
    finally:
        part.unlink(missing_ok=True)


def _copy_unless_hollow(source: Any, target: Any) -> bool:
    """Copy a file up to the mark of tensors without data; return False where it is found."""
    tail = b""
    while piece := source.read(_PIECE_BYTES):
        if MARK in tail + piece:
            return False
        tail = piece[-len(MARK) :]
        target.write(piece)
    return True
