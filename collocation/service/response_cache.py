"""Response cache: replays a 200 response for an identical request before the body is parsed."""

import struct
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.byte_cache import content_key
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.history import LOOKUPS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CACHED = {
    "/v1/classify": b"application/json",
    "/v1/placements": b"application/json",
    "/v1/slurm": b"text/plain; charset=utf-8",
}
"""Paths whose responses depend on the body, the checkpoint and the observations alone, with their content types."""
NO_STORE = (b"cache-control", b"no-store")
"""The header of a response that may differ the next time."""
_COUNT, _OBSERVED = struct.Struct(">H"), struct.Struct(">16sQQ")
"""An entry starts with the number of jobs that were looked up, and their observations; 0 runs means none."""


class ResponseCache:
    """Responses by request. An entry is valid while the observations that it was made with are the same."""

    def __init__(self, app: Application, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    def key(self, scope: Scope, body: bytes) -> bytes | None:
        """Return the key of a request, or None if its responses are not cached."""
        if scope["path"] not in CACHED or scope["method"] != "POST":
            return None
        # The content type matters, because another one is refused.
        content_type = next((text for name, text in scope["headers"] if name == b"content-type"), b"")
        return content_key(scope["path"].encode(), content_type, body)

    async def get(self, key: bytes) -> bytes | None:
        """Return the body of the cached response."""
        entry = self.engine.responses.get(key)
        body = None if entry is None else await self._valid(entry)
        self.engine.count_response(body is not None)
        return body

    async def replay(self, path: str, body: bytes, send: Send) -> None:
        """Send a cached response."""
        headers = [(b"content-type", CACHED[path]), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def fill(self, key: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer, and keep its response if it is good."""
        checkpoint, good, parts = self.engine.checkpoint, False, []
        lookups = LOOKUPS.get()

        async def record(message: Message) -> None:
            nonlocal good
            if message["type"] == "http.response.start":
                good = message["status"] == 200 and NO_STORE not in message["headers"] and not lookups.unavailable
            else:
                parts.append(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, record)
        if good and checkpoint is self.engine.checkpoint:  # it was not reloaded meanwhile
            self.engine.responses.put(key, _heading(lookups.peaks) + b"".join(parts))

    async def _valid(self, entry: bytes) -> bytes | None:
        """Return the body of an entry, unless one of its jobs was observed or forgotten since, or may have been."""
        (count,) = _COUNT.unpack_from(entry)
        start = _COUNT.size + count * _OBSERVED.size
        observed = _OBSERVED.iter_unpack(memoryview(entry)[_COUNT.size : start])
        for key, *figures in observed:
            if _figures(await self.engine.history.get(key)) != figures:
                return None
        return None if LOOKUPS.get().unavailable else entry[start:]


def _heading(looked_up: Mapping[bytes, ObservedPeak | None]) -> bytes:
    return _COUNT.pack(len(looked_up)) + b"".join(
        _OBSERVED.pack(key, *_figures(peak)) for key, peak in looked_up.items()
    )


def _figures(peak: ObservedPeak | None) -> list[int]:
    return [peak.runs, peak.peak_bytes] if peak else [0, 0]
