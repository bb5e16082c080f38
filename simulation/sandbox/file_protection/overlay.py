"""An overlay over all files: a mount namespace in which every directory is copied on write (overlayfs).

A directory that has other mounts below it cannot be covered as a whole without privileges. Its sub-directories are
covered instead, and the directory itself becomes read-only.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vramcast.simulation.sandbox.file_protection import kernel

_MOUNTS = Path("/proc/self/mountinfo")
_NOT_FILES = {
    "autofs", "bdev", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "cpuset", "debugfs", "devpts", "efivarfs",
    "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs",
    "tracefs",
}  # fmt: skip
_IN_MEMORY = {"tmpfs", "ramfs"}
_DEVICES = Path("/dev")
"""It becomes read-only: devices can be used there, and not under an overlay."""
MEMORY, COVERS = "memory", "covers"
"""Where the file system in memory is mounted, and the upper directories of the covers; both below the scratch."""
_VARIANTS = ("redirect_dir=on", "userxattr", "")
"""Options of a mount, the best first: with privileges, in a user namespace since Linux 5.11, and else."""


@dataclass(frozen=True)
class _Mount:
    number: str
    path: Path
    kind: str
    read_only: bool

    @property
    def holds_changeable_files(self) -> bool:
        """Return True where a process may change files."""
        return self.kind not in _NOT_FILES and not self.read_only


@dataclass(frozen=True)
class Cover:
    """A directory that is copied on write, and where its changes are kept."""

    path: Path
    name: str
    in_memory: bool
    device: int
    """The number of the file system that the directory lies on."""


@dataclass(frozen=True)
class _Base:
    """A directory that holds upper directories, and the mount options that its file system takes."""

    descriptor: int
    variant: str | None


def enter(scratch: Path) -> tuple[int, list[Cover]]:
    """Cover all files that this process can change; return the directory in memory, and the covers.

    Raises:
        OSError: The machine does not allow it, or the working directory cannot be covered.
    """
    directory = Path.cwd()
    was_writable = os.access(directory, os.W_OK)
    kernel.enter_namespace(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    mounts = _mounts()
    memory = _mount_memory(scratch)
    disk, memory_base = _base(scratch, os.open(scratch, os.O_RDONLY)), _base(scratch, memory)
    if disk.variant is None and memory_base.variant is None:
        raise OSError(errno.EOPNOTSUPP, "overlayfs does not work here")
    covers = []
    for number, (path, kind) in enumerate(list(_coverable(mounts))):
        inside = scratch.is_relative_to(path)
        in_memory = inside or disk.variant is None or (kind in _IN_MEMORY and memory_base.variant is not None)
        cover = Cover(path, f"{number}", in_memory, path.stat().st_dev)
        with suppress(OSError):  # a file system that cannot be covered becomes read-only below
            _cover(cover, memory_base if in_memory else disk)
            covers.append(cover)
    covered = {item.path for item in covers}
    for item in mounts:
        if item.holds_changeable_files and item.path not in covered:
            kernel.make_read_only(str(item.path))
    os.chdir(directory)
    if was_writable:
        _check_writable()
    return memory, covers


def works(scratch: Path) -> bool:
    """Return True where `enter` works; tried in a process that ends at once."""
    trial = scratch / "trial"
    trial.mkdir()
    pid = os.fork()
    if pid == 0:
        try:
            enter(trial)
        except BaseException:  # the answer is the exit code, in whatever way it failed
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    shutil.rmtree(trial, ignore_errors=True)
    return os.waitstatus_to_exitcode(status) == 0


def _mounts() -> list[_Mount]:
    """Return the mounts that this process can reach; one may lie hidden under another."""
    mounts: dict[Path, _Mount] = {}
    for line in os.fsdecode(_MOUNTS.read_bytes()).split("\n"):
        fields, _, rest = line.partition(" - ")
        words = fields.split(" ")
        if len(words) > 5:
            path = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), words[4]))
            mounts[path] = _Mount(words[0], path, rest.split(" ")[0], "ro" in words[5].split(","))
    return [item for item in mounts.values() if not item.holds_changeable_files or _number_at(item.path) == item.number]


def _number_at(path: Path) -> str | None:
    """Return the number of the mount that is at a path, None where the path cannot be reached."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOTDIR):
            return None
        raise
    try:
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    finally:
        os.close(descriptor)
    return next(line.split()[1] for line in text.split("\n") if line.startswith("mnt_id:"))


def _coverable(mounts: list[_Mount]) -> Iterator[tuple[Path, str]]:
    """Yield the highest directories that have no mount below them, with the kind of their file system.

    The neighbours of the scratch directory are in memory, so it shares no cover with the rest of /var.
    """
    points = {item.path for item in mounts}
    chain = {parent for point in points for parent in point.parents} | {Path("/var")}
    for item in mounts:
        if item.holds_changeable_files:
            for path in _leaves(item.path, chain, points):
                yield path, item.kind


def _leaves(path: Path, chain: set[Path], points: set[Path]) -> Iterator[Path]:
    if path == _DEVICES or not path.is_dir():
        return  # a single file that is mounted
    if path not in chain:
        yield path
        return
    with suppress(OSError):
        for entry in sorted(os.scandir(path), key=lambda item: item.name):
            child = path / entry.name
            if entry.is_dir(follow_symlinks=False) and child not in points:
                yield from _leaves(child, chain, points)


def _mount_memory(scratch: Path) -> int:
    target = scratch / MEMORY
    target.mkdir(exist_ok=True)
    kernel.mount("tmpfs", str(target), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0700")
    return os.open(target, os.O_RDONLY)


def _base(scratch: Path, descriptor: int) -> _Base:
    """Find the mount options with which a removed directory can be made again, which needs extended attributes."""
    for variant in _VARIANTS:
        try:
            with tempfile.TemporaryDirectory(dir=scratch) as lower, tempfile.TemporaryDirectory(dir=scratch) as target:
                _try_variant(Path(lower), Path(target), descriptor, variant)
        except OSError:
            continue
        return _Base(descriptor, variant)
    return _Base(descriptor, None)


def _try_variant(lower: Path, target: Path, base: int, variant: str) -> None:
    (lower / "directory").mkdir()
    name = f"test-{variant}"
    try:
        _mount_overlay(lower, target, base, name, variant)
        try:
            (target / "directory").rmdir()
            (target / "directory").mkdir()
        finally:
            kernel.unmount(str(target))
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=base)


def _cover(cover: Cover, base: _Base) -> None:
    name = f"{COVERS}-{cover.name}"
    _mount_overlay(cover.path, cover.path, base.descriptor, name, base.variant or "")


def _mount_overlay(lower: Path, target: Path, base: int, name: str, variant: str) -> None:
    """Mount an overlay; directories are named by descriptors, so that paths need no escapes and may be hidden."""
    for part in ("", "/upper", "/work"):
        os.mkdir(f"{name}{part}", dir_fd=base)
    status = lower.stat()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptors = [
        os.open(lower, flags),
        *(os.open(f"{name}/{part}", flags, dir_fd=base) for part in ("upper", "work")),
    ]
    try:
        os.fchmod(descriptors[1], status.st_mode & 0o7777)
        with suppress(OSError):  # another user's directory
            os.fchown(descriptors[1], status.st_uid, status.st_gid)
        parts = [
            f"{key}=/proc/self/fd/{fd}"
            for key, fd in zip(("lowerdir", "upperdir", "workdir"), descriptors, strict=True)
        ]
        options = ",".join([*parts, variant] if variant else parts)
        kernel.mount("overlay", str(target), "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _check_writable() -> None:
    """Raise where the covered working directory lost its writability, as that of a foreign group does."""
    with tempfile.TemporaryDirectory(prefix=".vramcast-", dir="."):
        pass
