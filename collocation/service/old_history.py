"""Reads the history of earlier versions: a file of lines, of which the last of a job counts."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.database import StorageDownError
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.storage import Storage
from vramcast.dataset_builder.store.lines import decode_line, encode_line
from vramcast.errors import UserError

_HEADER = encode_line("history", {"version": 1})
_KEY_BYTES = 16
_MOST = 2**63


def import_history(path: Path, storage: Storage) -> None:
    """Add the peaks of a file to a storage. A file that was added before is left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"expected a file of --import-history at {path}, found: {error.strerror}; check the path"
        ) from error
    peaks = read_peaks(content, path)
    try:
        is_new = storage.add_file(peaks, content)
    except StorageDownError as error:
        raise UserError(f"expected a database for --import-history, found: {error}; start it first") from error
    event("history imported" if is_new else "history imported before", jobs=len(peaks))


def read_peaks(content: bytes, path: Path) -> dict[bytes, ObservedPeak]:
    """Return the observed peaks in a file. Damaged lines, and one that a crash cut short, are left out."""
    lines = content.splitlines(keepends=True)
    if not lines or lines[0] != _HEADER:
        raise UserError(
            f"expected a history of an earlier version of vramcast serve at {path}, found another kind of file: "
            "choose another --import-history FILE"
        )
    peaks: dict[bytes, ObservedPeak] = {}
    damaged = 0
    for number, raw in enumerate(lines[1:], 2):
        record, fault = decode_line(raw)
        if record is None or fault:
            damaged += 1
            continue
        try:
            key = bytes.fromhex(record["job"])
            peak = _peak(key, record)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"expected lines of version 1 in {path}, found another in line {number} ({error}): check the file"
            ) from error
        peaks.pop(key, None)
        if peak:
            peaks[key] = peak
    if damaged:
        event("lines of the history left out", logging.WARNING, path=str(path), lines=damaged)
    return peaks


def _peak(key: bytes, record: Mapping[str, Any]) -> ObservedPeak | None:
    """Return the peak in a sound line; None if its job is forgotten. Raise if it is of another version."""
    kind = record["type"]
    if kind not in ("known", "forgotten") or len(key) != _KEY_BYTES:
        raise ValueError(f"of the type {kind!r} with a job of {len(key)} bytes")
    return ObservedPeak(_count(record, "runs"), _count(record, "peak_bytes")) if kind == "known" else None


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record[name]
    if type(value) is not int or not 0 < value < _MOST:
        raise ValueError(f"with {name} of {value!r}")
    return value
