"""The messages of parents and children: each is a line of JSON, and a pickle behind a line that announces one.

A reader never unpickles by itself: a parent that does not trust its child ignores payloads.
"""

from collections.abc import Mapping
from json import dumps, loads  # by their names: a script may replace the functions of the module
from typing import Any

READY, DONE, REFUSED, FAILED, INTERNAL = "ready", "done", "refused", "failed", "internal"
"""Events of all children: it can take requests; a result; a `UserError`; another error; an error of vramcast."""
PAYLOAD = "payload"
"""The key of a pickle: its length on the line, its bytes in a message that was read."""


def encode(message: Mapping[str, Any], payload: bytes | None = None) -> bytes:
    """Return a message as it is sent."""
    if payload is None:
        return dumps(message).encode() + b"\n"
    return dumps({**message, PAYLOAD: len(payload)}).encode() + b"\n" + payload


class Decoder:
    """Assembles messages from the pieces that a pipe delivers."""

    def __init__(self, longest_bytes: float, key: str | None = None) -> None:
        self.fault: str | None = None
        """An error in what was read; None if it is well-formed."""
        self._longest_bytes = longest_bytes
        self._key = key
        """The key that each message must have."""
        self._unread = bytearray()
        self._searched = 0
        self._announced: dict[str, Any] | None = None
        """A message whose payload is still to come."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add a piece, and return the messages that it completes."""
        self._unread += data
        messages = []
        while self.fault is None and (message := self._next()) is not None:
            messages.append(message)
        if self.fault is None and len(self._unread) > self._longest_bytes:
            self.fault = f"the child's answer is too long (over {self._longest_bytes} bytes)"
        return messages

    def _next(self) -> dict[str, Any] | None:
        if self._announced is None:
            end = self._unread.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._unread)  # a long line is not searched again with each piece
                return None
            line = self._take(end + 1)[:-1]
            message = self._parsed(line)
            if message is None:
                self.fault = f"the child's answer is not a report ({line[:80]!r})"
            if message is None or PAYLOAD not in message:
                return message
            self._announced = message
        message = self._announced
        if len(self._unread) < message[PAYLOAD]:
            return None
        self._announced = None
        return {**message, PAYLOAD: self._take(message[PAYLOAD])}

    def _take(self, size: int) -> bytes:
        taken = bytes(self._unread[:size])
        del self._unread[:size]
        self._searched = 0
        return taken

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = loads(line)
        except ValueError:
            return None
        if not isinstance(message, dict) or (self._key is not None and self._key not in message):
            return None
        size = message.get(PAYLOAD, 0)
        return message if type(size) is int and 0 <= size <= self._longest_bytes else None
