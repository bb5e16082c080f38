"""Cuts the weights out of an ONNX file before it is parsed: they are most of it, and only their shapes are read.

The wire format is that of protobuf (protobuf.dev/programming-guides/encoding), the numbers are fields of onnx.proto.
"""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

from vramcast.errors import UserError
from vramcast.jobs.network_files.limits import FILE_BYTES, OPERATIONS, shown

_GRAPH_OF_MODEL, _NODES, _INITIALIZERS = 7, 1, 5
_SMALL_BYTES = 4096
"""Messages up to this size are kept whole: shapes of reshapes are among them, which the sizes of outputs depend on."""
_DEEPEST = 20
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR = "model", "graph", "node", "attribute", "tensor"
_INSIDE: Mapping[str, Mapping[int, str]] = {
    _MODEL: {_GRAPH_OF_MODEL: _GRAPH},
    _GRAPH: {_NODES: _NODE, _INITIALIZERS: _TENSOR},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH},
    _TENSOR: {},
}
_VALUES_OF_TENSOR = frozenset({4, 5, 6, 7, 9, 10, 11, 13})
"""float_data, int32_data, string_data, int64_data, raw_data, double_data, uint64_data, external_data."""

Buffer = bytes | mmap.mmap


class _DamagedError(ValueError):
    """Bytes that are no message."""


def graph_without_weights(source: Path | bytes) -> bytes:
    """Return the file without the values of its weights; it is mapped, so that weights are never read."""
    try:
        if isinstance(source, bytes):
            return _Cut().message(source, 0, len(source), _MODEL, 0)
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Cut().message(mapped, 0, len(mapped), _MODEL, 0)
    except (_DamagedError, OSError, ValueError) as error:  # mmap refuses an empty file
        if isinstance(error, UserError):
            raise
        raise UserError(f"expected a sound ONNX file, found: {shown(str(error))}; export it again") from error


def looks_like_onnx(head: bytes) -> bool:
    """Return whether a file may begin like this: with the version of the format, a small number in its first field."""
    return len(head) > 2 and head[0] == 0x08 and 0 < head[1] < 0x80


class _Cut:
    def __init__(self) -> None:
        self._nodes = 0
        self._bytes = 0

    def message(self, data: Buffer, start: int, end: int, kind: str, depth: int) -> bytes:
        """Return a message without values of tensors."""
        if depth > _DEEPEST:
            raise _DamagedError(f"more than {_DEEPEST} levels of messages")
        parts: list[bytes] = []
        for number, field_start, value_start, field_end, nested in _fields(data, start, end):
            inside = _INSIDE[kind].get(number)
            if inside == _NODE:
                self._nodes += 1
                if self._nodes > OPERATIONS:
                    raise UserError(f"expected at most {OPERATIONS} operations in the file, found more: name another")
            if kind == _TENSOR and number in _VALUES_OF_TENSOR:
                continue
            if nested and inside and (field_end - value_start > _SMALL_BYTES or inside == _GRAPH):
                body = self.message(data, value_start, field_end, inside, depth + 1)
                parts.append(_varint(number << 3 | 2) + _varint(len(body)) + body)
            else:
                self._count(field_end - field_start)
                parts.append(bytes(data[field_start:field_end]))
        return b"".join(parts)

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > FILE_BYTES:
            raise UserError(
                f"expected at most {FILE_BYTES >> 20} MiB beside the weights of the network, found more: name another "
                "file"
            )


def _fields(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield number, start, start of the value, end, and whether the value is a message or a text."""
    at = start
    while at < end:
        key, value_start = _read_varint(data, at, end)
        number, wire = key >> 3, key & 7
        length = 0
        if wire == 0:
            _, after = _read_varint(data, value_start, end)
        elif wire == 2:
            length, value_start = _read_varint(data, value_start, end)
            after = value_start + length
        elif wire in (1, 5):
            after = value_start + (8 if wire == 1 else 4)
        else:
            raise _DamagedError(f"a field of the unknown type {wire}")
        if after > end or number == 0:
            raise _DamagedError("a field that ends behind its message: it is truncated or no ONNX")
        yield number, at, value_start, after, wire == 2
        at = after


def _read_varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _DamagedError("a number without an end: it is truncated or no ONNX")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
