"""An LRU cache of byte strings that is bounded by bytes."""

from collections import OrderedDict
from hashlib import blake2b

_ENTRY_BYTES = 200
"""About what an entry takes beside its value: a key of 16 bytes as an object, and its place in the dictionary."""


def content_key(*parts: bytes) -> bytes:
    """Return a hash of 128 bits over parts and their lengths."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class ByteCache:
    """Byte strings by key; the least recently used are dropped first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None if it is not cached."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Keep a value, unless it is larger than the cache."""
        self._drop(key)
        if len(value) + _ENTRY_BYTES > self.limit_bytes:
            return
        self._entries[key] = value
        self.size_bytes += len(value) + _ENTRY_BYTES
        while self.size_bytes > self.limit_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Drop all values."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.size_bytes -= len(value) + _ENTRY_BYTES
