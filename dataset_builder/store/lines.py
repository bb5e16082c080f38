"""Lines whose damage shows, and those of a journal: JSON objects whose last key is a checksum of all before it."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vramcast.dataset_builder.schema import SCHEMA_VERSION
from vramcast.errors import UserError

HEADER, ROW, REJECTION = "header", "row", "rejection"


def _ending(body: bytes) -> bytes:
    return b',"crc32":"%08x"}\n' % zlib.crc32(body)


_ENDING_LENGTH = len(_ending(b""))
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Line(NamedTuple):
    """A line as it stands in the file, what it says, and what is wrong with it."""

    number: int
    raw: bytes
    record: dict[str, Any] | None
    """None where the checksum fails: a write that was cut short looks like that."""
    fault: str | None = None


def encode_line(kind: str, values: Mapping[str, Any]) -> bytes:
    """Write a record as one line of ASCII; NaN is refused, since JSON has none."""
    body = _ENCODER.encode({"type": kind, **values})[:-1].encode("ascii")
    return body + _ending(body)


def decode_line(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """The record that `encode_line` wrote, or None and what is wrong with the line."""
    if not raw.endswith(b"\n"):
        return None, "is incomplete"
    if raw[-_ENDING_LENGTH:] != _ending(raw[:-_ENDING_LENGTH]):
        return None, "does not match its checksum"
    try:
        return json.loads(raw.decode("ascii")), None
    except (ValueError, RecursionError):
        return None, "is not JSON"


def read_lines(path: Path) -> Iterator[Line]:
    """Every line, sound or not, while another process may be writing."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield _check(number, raw, seen)
                if not raw.endswith(b"\n"):
                    return  # what a running build has added since would be half a line
    except OSError as error:
        raise UserError(
            f"expected to read {path}, found: {error.strerror}; see to its permissions and to the disk"
        ) from error


def sound_records(path: Path, on_torn: Callable[[str], None]) -> Iterator[tuple[Line, dict[str, Any]]]:
    """The lines that hold; a torn last line is told to `on_torn`, any other bad line ends the reading."""
    lines = read_lines(path)
    for line in lines:
        if line.fault is None and line.record is not None:
            if line.number == 1:
                check_schema(path, line.record)
            yield line, line.record
        elif line.record is None and next(lines, None) is None:
            on_torn(
                f"the last line of {path}, line {line.number}, {line.fault}: it is left out, "
                "and the same build, run again, makes it anew"
            )
        else:
            raise corrupt(path, line.number, line.fault)


def corrupt(path: Path, number: int, fault: str | None) -> UserError:
    """The error for a line that cannot be explained by a write that was cut short."""
    return UserError(
        f"expected every line of {path} to be sound, found that line {number} {fault}: "
        f"'vramcast build repair {path}' sets such lines aside"
    )


def check_schema(path: Path, header: Mapping[str, Any]) -> None:
    """Refuse a journal of another version of the schema."""
    found = header.get("schema")
    if found == SCHEMA_VERSION:
        return
    newer = isinstance(found, int) and found > SCHEMA_VERSION
    mend = "install a newer vramcast" if newer else "build anew in another out=DIR"
    raise UserError(f"expected schema {SCHEMA_VERSION} in {path}, found {found!r}: {mend}")


def _check(number: int, raw: bytes, seen: set[str]) -> Line:
    record, fault = decode_line(raw)
    return Line(number, raw, record, fault or _misplaced(number, record or {}, seen))


def _misplaced(number: int, record: dict[str, Any], seen: set[str]) -> str | None:
    """Faults that a checksum cannot see: what is left when journals are joined or cut by hand."""
    kind, key = record.get("type"), record.get("id")
    if kind == HEADER:
        return None if number == 1 else "is a second header"
    if number == 1:
        return "is not a header"
    if kind not in (ROW, REJECTION) or not isinstance(key, str):
        return f"is of the unknown type {kind!r} or has no id"
    if key in seen:
        return f"repeats the id {key}"
    seen.add(key)
    return None
