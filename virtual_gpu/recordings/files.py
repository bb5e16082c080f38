"""Reads files of memory snapshots: pickles, and JSON, which may be compressed with xz or gzip."""

import json
import lzma
import zlib
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.virtual_gpu.recordings.pickles import load_containers
from vramcast.virtual_gpu.recordings.recording import Recording, recording_of

MOST_BYTES = 2**30
"""The limit of a file, and of the contents of a compressed one."""
_DICTIONARY_BYTES = 2**28
"""Memory that xz may take."""


def read_recording(path: Path) -> Recording:
    """Return the memory snapshot in a file; raise UserError if there is none."""
    return recording_of(read_values(path), path.name)


def read_values(path: Path) -> Any:
    """Return the lists, dicts and scalars in a pickle or a JSON file."""
    data = _contents(path)
    if data[:1] == b"\x80":
        return load_containers(data, path.name)
    if data[:1].strip() and data[:1] not in b"{[":
        raise UserError(
            f"expected a memory snapshot, a pickle or JSON, in {path}, found another format: write it with "
            "torch.cuda.memory._dump_snapshot"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"expected JSON in {path}, found text that is cut or damaged: write it again") from None


def _contents(path: Path) -> bytes:
    """Return the bytes of a file, uncompressed."""
    if path.is_dir():
        raise UserError(f"expected a file, found the directory {path}: name a file in it")
    if not path.exists():
        raise UserError(f"expected a memory snapshot at {path}, found no file: check the name")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    _check_size(data, path)
    if not data:
        raise UserError(f"expected a memory snapshot in {path}, found an empty file: write it again")
    try:
        if data[:6] == b"\xfd7zXZ\x00":
            data = lzma.LZMADecompressor(memlimit=_DICTIONARY_BYTES).decompress(data, MOST_BYTES + 1)
        elif data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data, MOST_BYTES + 1)
    except (lzma.LZMAError, zlib.error, EOFError):
        raise UserError(f"expected a whole compressed file at {path}, found a damaged one: copy it again") from None
    _check_size(data, path)
    return data


def _check_size(data: bytes, path: Path) -> None:
    if len(data) > MOST_BYTES:
        raise UserError(
            f"expected at most {MOST_BYTES >> 20} MiB in {path}, found more: record fewer events (max_entries)"
        )
