"""Good answers are kept by all that was asked, and given again before anything is parsed."""

import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.byte_cache import content_key
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.history import LOOKED_UP

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

KEPT = {
    "/v1/classify": b"application/json",
    "/v1/placements": b"application/json",
    "/v1/slurm": b"text/plain; charset=utf-8",
}
"""Paths whose answers depend on the body, the checkpoint and what was observed, and what they answer with."""

NOT_KEPT = (b"cache-control", b"no-store")
"""Of an answer that may be another the next time."""


_COUNT, _TOLD = struct.Struct(">H"), struct.Struct(">16sQQ")
"""Before a kept answer: how many jobs it looked up, and what it was told of each, 0 runs where nothing was known."""


class ResponseCache:
    """Pure ASGI around the application: a kept answer takes a fraction of the time of the frameworks behind it."""

    def __init__(self, app: Application, engine: Engine, paths: Collection[str] = tuple(KEPT)) -> None:
        self.app = app
        self.engine = engine
        self.paths = frozenset(paths)

    async def answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request whose body was read; `receive` gives it once more to whoever works it out."""
        path = scope["path"]
        if path not in self.paths or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        # The content type is part of what is said: a body of another kind is refused.
        kind = next((text for name, text in scope["headers"] if name == b"content-type"), b"")
        key = content_key(path.encode(), kind, body)
        kept = self._still_true(self.engine.responses.get(key))
        self.engine.count_response(kept is not None)
        if kept is None:
            await self._worked_out(key, scope, receive, send)
            return
        headers = [(b"content-type", KEPT[path]), (b"content-length", str(len(kept)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": kept})

    async def _worked_out(self, key: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        checkpoint, good, parts = self.engine.checkpoint, False, []
        told: dict[bytes, ObservedPeak | None] = {}
        LOOKED_UP.set(told)

        async def noted(message: Message) -> None:
            nonlocal good
            if message["type"] == "http.response.start":
                good = message["status"] == 200 and NOT_KEPT not in message["headers"]
            else:
                parts.append(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, noted)
        if good and checkpoint is self.engine.checkpoint:  # not reloaded meanwhile
            self.engine.responses.put(key, _heading(told) + b"".join(parts))

    def _still_true(self, entry: bytes | None) -> bytes | None:
        """The answer that was kept, unless a job that it is about was observed or forgotten since."""
        if entry is None:
            return None
        (count,) = _COUNT.unpack_from(entry)
        start = _COUNT.size + count * _TOLD.size
        told = _TOLD.iter_unpack(memoryview(entry)[_COUNT.size : start])
        same = all(_figures(self.engine.history.get(key)) == figures for key, *figures in told)
        return entry[start:] if same else None


def _heading(told: Mapping[bytes, ObservedPeak | None]) -> bytes:
    return _COUNT.pack(len(told)) + b"".join(_TOLD.pack(key, *_figures(found)) for key, found in told.items())


def _figures(found: ObservedPeak | None) -> list[int]:
    return [found.runs, found.peak_bytes] if found else [0, 0]
