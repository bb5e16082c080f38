"""Caches on disk: what is damaged is made again with a note, and who finds a journal locked waits for the other."""

import json
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from vramcast.dataset_builder.rows import SCHEMA_VERSION, Row
from vramcast.dataset_builder.store.journal import JournalWriter
from vramcast.dataset_builder.store.lines import HEADER, ROW, decode_line, encode_line, read_lines
from vramcast.dataset_builder.store.reader import JOURNAL_NAME
from vramcast.files.durable import held, replacing
from vramcast.virtual_gpu.canonical import canonical_json

T = TypeVar("T")
_CHECKSUM = "crc32"


def read_entry(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
    """Return what a file holds, or None if there is no file; a damaged one is removed with a note."""
    try:
        return parse(_entry(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        print(f"note: the cached file {path} is damaged: it is made again", file=sys.stderr)
        path.unlink(missing_ok=True)
        return None


def _entry(raw: bytes) -> dict[str, Any]:
    record, fault = decode_line(raw)
    if record is None:
        record = json.loads(raw)  # entries of earlier releases have no checksum
        if _CHECKSUM in record:
            raise ValueError(fault)
    return record


def write_entry(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that `read_entry` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(encode_line("entry", values))


def read_rows(directory: Path, settings: Mapping[str, Any], wanted: Container[str]) -> dict[str, Row]:
    """Return the wanted rows of a journal by their ids; another process may be writing it."""
    return _read(directory / JOURNAL_NAME, settings, wanted)[0]


@contextmanager
def writing(
    directory: Path, settings: Mapping[str, Any], wanted: Container[str]
) -> Iterator[tuple[JournalWriter, dict[str, Row]]]:
    """Open a journal to add rows, without its damaged lines; yield it with the wanted rows that it has by then."""
    with held(directory / "lock", directory, "vramcast", "directory for the cache", waits=True):
        journal = directory / JOURNAL_NAME
        rows, damaged = _read(journal, settings, wanted)
        if damaged:
            print(
                f"note: {len(damaged)} lines of {journal} are damaged: their simulations are made again",
                file=sys.stderr,
            )
            _rewrite(journal, settings, damaged)
        with JournalWriter(directory, settings, is_locked=True) as writer:
            yield writer, rows


def _header(settings: Mapping[str, Any]) -> bytes:
    return encode_line(HEADER, {"schema": SCHEMA_VERSION, "build": json.loads(canonical_json(settings))})


def _read(journal: Path, settings: Mapping[str, Any], wanted: Container[str]) -> tuple[dict[str, Row], set[int]]:
    """Return the wanted rows by their ids, and the numbers of the lines that cannot be used."""
    rows: dict[str, Row] = {}
    damaged: set[int] = set()
    foreign = False
    for line in read_lines(journal) if journal.exists() else ():
        if line.number == 1 and line.record is not None and not line.fault:
            foreign = line.raw != _header(settings)  # that of another schema
        if foreign or line.record is None or line.fault:
            damaged.add(line.number)
        elif line.record["type"] == ROW and line.record["id"] in wanted:
            try:
                row = Row.from_json(line.record)
            except (KeyError, TypeError, ValueError, AttributeError):  # of another schema
                damaged.add(line.number)
            else:
                rows[row.spec.id] = row
    return rows, damaged


def _rewrite(journal: Path, settings: Mapping[str, Any], damaged: Container[int]) -> None:
    with replacing(journal) as temporary, temporary.open("wb") as file:
        file.write(_header(settings))
        file.writelines(line.raw for line in read_lines(journal) if line.number > 1 and line.number not in damaged)
