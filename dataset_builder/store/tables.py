"""The layer tables of a build, `tables.jsonl`: a line with a checksum for each network, packed, beside the journal.

A table is written before the first row of its network, so that every row has one; what a stopped build wrote twice, or
only in part, does no harm.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vramcast.dataset_builder.store.lines import decode_line, encode_line
from vramcast.errors import UserError
from vramcast.files.durable import write_all
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.virtual_gpu.canonical import canonical_json, content_hash

TABLES_NAME = "tables.jsonl"
_TABLE = "table"


def table_key(spec: Spec) -> str:
    """Return the key of a spec's table: its group, unless an adapter or quantised weights change the layers."""
    changes = {"adapter": spec.training.adapter, "quantize": spec.training.quantize}
    return content_hash({"group": spec.group, **changes}) if any(changes.values()) else spec.group


class TableWriter:
    """Appends tables to the file of a build, whose directory the caller has locked. Use it as a context manager."""

    def __init__(self, directory: Path | str) -> None:
        self.path = Path(directory) / TABLES_NAME
        self._keys: set[str] = set()
        self._fd: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def append(self, spec: Spec, table: LayerTable) -> None:
        """Append the table of a spec, unless the file has it."""
        key = table_key(spec)
        if self._fd is None:
            self._fd = self._open()
        if key not in self._keys:
            write_all(self._fd, encode_line(_TABLE, {"id": key, "design": spec.design, "packed": _pack(table)}))
            self._keys.add(key)

    def _open(self) -> int:
        """Open the file without an incomplete last line, and note the keys in it."""
        end_bytes = 0
        if self.path.exists():
            for raw, record in _records(self.path):
                self._keys.add(record["id"])
                end_bytes += len(raw)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(fd, end_bytes)
        return fd


def read_tables(directory: Path | str) -> Iterator[tuple[str, LayerTable]]:
    """Yield the tables of a build by `table_key`; a build may be writing them."""
    path = Path(directory) / TABLES_NAME
    if not path.exists():
        raise UserError(f"expected the layer tables of a build at {path}, found none: build with backend.tables=true")
    for _, record in _records(path):
        yield record["id"], _unpack(record["packed"])


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            record, fault = decode_line(raw)
            if record is not None:
                yield raw, record
            elif raw.endswith(b"\n"):
                raise UserError(f"expected a layer table in each line of {path}, found that line {number} {fault}: "
                                "remove that line")  # fmt: skip
            else:
                return


def _pack(table: LayerTable) -> str:
    return base64.b85encode(zlib.compress(canonical_json(table.to_json()).encode("ascii"), 6)).decode("ascii")


def _unpack(text: str) -> LayerTable:
    return LayerTable.from_json(json.loads(zlib.decompress(base64.b85decode(text))))
