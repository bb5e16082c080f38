"""Messages from the process of a script to its supervisor, through memory that both share.

A script can close descriptors and open its own files under their numbers. It cannot close memory.
"""

import mmap
import struct
from collections.abc import Mapping
from typing import Any

from vramcast.child.messages import encode

MOST_BYTES = 2**28
_LENGTH = struct.Struct("<Q")
_FORKED = _LENGTH.size
_START = _FORKED + 1


class ReportMemory:
    """Made before the fork: the worker writes, the supervisor reads. Pages that nobody wrote take no memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _START + MOST_BYTES)
        self._read = 0

    def report(self, message: Mapping[str, Any]) -> None:
        """Add a message."""
        data = encode(message)
        length = self._length
        if length + len(data) > MOST_BYTES:
            raise ValueError(f"expected a report of at most {MOST_BYTES} bytes, found {length + len(data)}")
        self._memory[_START + length : _START + length + len(data)] = data
        _LENGTH.pack_into(self._memory, 0, length + len(data))  # last: the reader never sees a part of a message

    def unread(self) -> bytes:
        """Return the messages that were added since the last call."""
        start, self._read = self._read, self._length
        return self._memory[_START + start : _START + self._read]

    def note_forked_use(self) -> None:
        """Note that a process which the worker forked has used the GPU."""
        self._memory[_FORKED] = 1

    @property
    def forked_use(self) -> bool:
        """Whether a process which the worker forked has used the GPU."""
        return bool(self._memory[_FORKED])

    @property
    def _length(self) -> int:
        return int(_LENGTH.unpack_from(self._memory)[0])
