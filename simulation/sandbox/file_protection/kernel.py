"""System calls of Linux that protect files: namespaces, mounts and Landlock, by ctypes."""

import ctypes
import errno
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000  # linux/sched.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18  # mount.h
_KEPT_FLAGS = {2: MS_NOSUID, 4: MS_NODEV, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs(3) and of mount(2): a remount in a user namespace must repeat them."""
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # asm-generic/unistd.h
_LANDLOCK_PATH_BENEATH = 1
_FILE_RIGHTS = (1 << 1) | (1 << 14)
"""To write and to truncate a file (linux/landlock.h)."""
_WRITE_RIGHTS = _FILE_RIGHTS | sum(1 << bit for bit in range(4, 14))
"""Those, and to make, remove, link and rename the entries of a directory."""
_LEAST_LANDLOCK = 3
"""The first version of Landlock that stops a truncation, of Linux 6.2."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, action: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process to namespaces of its own."""
    try:
        _check(_libc().unshare(flags), "unshare")
    except AttributeError as error:  # not Linux
        raise OSError(errno.ENOSYS, "unshare: not available") from error


def enter_namespace(flag: int) -> None:
    """Enter a namespace; without the privilege, in a user namespace, which brings it along."""
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(flag)
    except PermissionError:
        unshare(CLONE_NEWUSER | flag)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with suppress(OSError):  # without a map the user is "nobody", who may read the same files
                Path("/proc/self", name).write_text(text, encoding="ascii")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system, or change a mount."""
    words = [None if item is None else os.fsencode(item) for item in (source, target, kind)]
    options = None if data is None else os.fsencode(data)
    _check(_libc().mount(*words, ctypes.c_ulong(flags), options), f"mount of {target}")


def unmount(target: str) -> None:
    """Take the topmost mount from a path."""
    _check(_libc().umount2(os.fsencode(target), 0), f"unmount of {target}")


def make_read_only(target: str) -> None:
    """Make a mount read-only, with its other flags as they are."""
    present = os.statvfs(target).f_flag
    flags = sum(flag for bit, flag in _KEPT_FLAGS.items() if present & bit)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def drop_capabilities() -> None:
    """Give up the privileges that a user namespace brought along; root keeps its own."""
    if os.geteuid() == 0:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")


class _Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr` of its first version."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathRule(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers; 0 for none."""
    if platform.system() != "Linux":
        return 0
    return max(int(_libc().syscall(_LANDLOCK_CREATE, None, 0, 1)), 0)


def can_refuse_writes() -> bool:
    """Return True where `refuse_writes` works."""
    return landlock_version() >= _LEAST_LANDLOCK


def refuse_writes(writable: Iterable[Path]) -> None:
    """Refuse this process and its children every change of files outside of some directories, for ever."""
    libc = _libc()
    ruleset = _Ruleset(_WRITE_RIGHTS)
    descriptor = _check(libc.syscall(_LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0), "landlock")
    for path in writable:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # absent here
            continue
        rights = _WRITE_RIGHTS if path.is_dir() else _FILE_RIGHTS
        rule = _PathRule(rights, parent)
        _check(libc.syscall(_LANDLOCK_ADD, descriptor, _LANDLOCK_PATH_BENEATH, ctypes.byref(rule), 0), "landlock")
        os.close(parent)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(libc.syscall(_LANDLOCK_RESTRICT, descriptor, 0), "landlock")
    os.close(descriptor)
