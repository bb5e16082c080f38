"""The processes that descend from a process: their memory, and an end to all of them.

Linux only: elsewhere a process seems to have no descendants.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on; parents come before their children."""
    tree: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in _children(parent)]
        tree += level
    return tree


def memory_bytes(pids: Iterable[int], limit_bytes: float) -> int:
    """Return the memory that processes hold together.

    The sum of their resident sets is read first, because it is cheap. Where it exceeds the limit, pages that forked
    processes share are counted once.
    """
    pids = list(pids)
    resident_bytes = sum(map(_resident_bytes, pids))
    return resident_bytes if resident_bytes <= limit_bytes else sum(map(_proportional_bytes, pids))


def end_descendants(pid: int, seconds: float) -> None:
    """Kill all descendants of a process; new ones that they start meanwhile, too.

    A process that ends passes its children on, which may happen between the looks at its parent and at itself. So the
    last look finds none but zombies from before it: their children are in sight.
    """
    until = time.monotonic() + seconds
    ended: set[int] = set()
    while not ended.issuperset(tree := descendants(pid)) and time.monotonic() < until:
        ended = set(filter(_is_zombie, tree))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process starts no other
            for item in tree:
                if item not in ended:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(item, number)
        time.sleep(0.005)


def continue_stopped(pids: Iterable[int]) -> None:
    """Let processes go on that a signal has stopped."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


def _children(pid: int) -> list[int]:
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:  # ended, or not Linux
        return []
    children: list[int] = []
    for task in tasks:
        with suppress(OSError):
            children += map(int, (task / "children").read_text(encoding="ascii").split())
    return children


def _resident_bytes(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):  # ended, or not Linux
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return _resident_bytes(pid)
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _is_zombie(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[
            0
        ] in "ZX"
    except (OSError, IndexError):
        return True
