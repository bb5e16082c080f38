"""Lines with a checksum: JSON objects whose last key is the CRC-32 of everything before it."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vramcast.dataset_builder.rows import SCHEMA_VERSION
from vramcast.errors import UserError

HEADER, ROW, REJECTION = "header", "row", "rejection"


def _ending(body: bytes) -> bytes:
    return b',"crc32":"%08x"}\n' % zlib.crc32(body)


_ENDING_LENGTH = len(_ending(b""))
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Line(NamedTuple):
    """A line of a file, its record, and its fault."""

    number: int
    raw: bytes
    record: dict[str, Any] | None
    """None if the checksum does not match, as after an incomplete write."""
    fault: str | None = None


def encode_line(kind: str, values: Mapping[str, Any]) -> bytes:
    """Return a record as one line of ASCII; raise ValueError for NaN, which JSON does not have."""
    body = _ENCODER.encode({"type": kind, **values})[:-1].encode("ascii")
    return body + _ending(body)


def decode_line(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Return the record of a line, or None and the fault of the line."""
    if not raw.endswith(b"\n"):
        return None, "is incomplete"
    if raw[-_ENDING_LENGTH:] != _ending(raw[:-_ENDING_LENGTH]):
        return None, "does not match its checksum"
    try:
        return json.loads(raw.decode("ascii")), None
    except (ValueError, RecursionError):
        return None, "is not JSON"


def read_lines(path: Path) -> Iterator[Line]:
    """Yield every line, valid or not; another process may be writing."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield _check(number, raw, seen)
                if not raw.endswith(b"\n"):
                    return  # a running build may have appended the rest by now
    except OSError as error:
        raise UserError(
            f"expected to read {path}, found: {error.strerror}; check its permissions and the disk"
        ) from error


def valid_records(path: Path, on_torn: Callable[[str], None]) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield the valid lines; report an incomplete last line to `on_torn`, and raise UserError for any other fault."""
    lines = read_lines(path)
    for line in lines:
        if line.fault is None and line.record is not None:
            if line.number == 1:
                check_schema(path, line.record)
            yield line, line.record
        elif line.record is None and next(lines, None) is None:
            on_torn(
                f"the last line of {path}, line {line.number}, {line.fault}: it is left out, "
                "and running the same build again recreates it"
            )
        else:
            raise corrupt(path, line.number, line.fault)


def corrupt(path: Path, number: int, fault: str | None) -> UserError:
    """Return the error for a fault that an incomplete write does not explain."""
    return UserError(
        f"expected every line of {path} to be valid, found that line {number} {fault}: "
        f"'vramcast build repair {path}' moves such lines away"
    )


def check_schema(path: Path, header: Mapping[str, Any]) -> None:
    """Raise UserError for a journal of another schema version."""
    version = header.get("schema")
    if version == SCHEMA_VERSION:
        return
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    fix = "install a newer vramcast" if newer else "build again in another out=DIR"
    raise UserError(f"expected schema {SCHEMA_VERSION} in {path}, found {version!r}: {fix}")


def _check(number: int, raw: bytes, seen: set[str]) -> Line:
    record, fault = decode_line(raw)
    return Line(number, raw, record, fault or _misplaced(number, record or {}, seen))


def _misplaced(number: int, record: dict[str, Any], seen: set[str]) -> str | None:
    """Return a fault that a checksum does not show, as in journals that were joined or cut by hand."""
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
