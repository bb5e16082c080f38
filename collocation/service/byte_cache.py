"""What was answered before, up to so many bytes; what nobody asked for longest goes first."""

from collections import OrderedDict
from hashlib import blake2b

_ENTRY_BYTES = 200
"""About what an entry costs beside its value: a key of 16 bytes as an object, and its place in the dictionary."""


def content_key(*parts: bytes) -> bytes:
    """128 bits over parts, whose lengths count too."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class ByteCache:
    """Byte strings by key, least recently used first out."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> bytes | None:
        """What was put there, if it is still known."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, value: bytes) -> None:
        """Keep a value, unless it alone is more than may be kept."""
        self._drop(key)
        if len(value) + _ENTRY_BYTES > self.limit_bytes:
            return
        self._entries[key] = value
        self.size_bytes += len(value) + _ENTRY_BYTES
        while self.size_bytes > self.limit_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self.size_bytes -= len(found) + _ENTRY_BYTES
