"""History files for tests: written by a service, and read by the next one."""

import errno
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.history_file import HistoryFile

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def write_runs(path: Path, *runs: tuple[bytes, int], most: int = 100) -> None:
    """Open a history file, append each run on its own, and close it."""
    file = HistoryFile(path, most)
    peaks = OrderedDict(file.peaks)
    for key, peak_bytes in runs:
        peaks[key] = ObservedPeak(1, peak_bytes).joined(peaks.pop(key, None))
        file.append([(key, peaks[key])])
        if file.is_long:
            file.shorten(list(peaks.items())[-most:])
    file.close()


def read_peaks(path: Path, most: int = 100) -> dict[bytes, ObservedPeak]:
    """Return what the next service reads."""
    file = HistoryFile(path, most)
    file.close()
    return dict(file.peaks)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
