"""Good answers are kept by all that was asked, and given again before anything is parsed."""

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from collocation.service.cache import content_key
from collocation.service.engine import Engine

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
"""Paths whose answers depend on the body and the checkpoint alone, and what they answer with."""

NOT_KEPT = (b"cache-control", b"no-store")
"""Of an answer that may be another the next time."""


class Keeping:
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
        kept = self.engine.responses.get(key)
        self.engine.count_response(kept is not None)
        if kept is None:
            await self._worked_out(key, scope, receive, send)
            return
        headers = [(b"content-type", KEPT[path]), (b"content-length", str(len(kept)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": kept})

    async def _worked_out(self, key: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        checkpoint, good, parts = self.engine.checkpoint, False, []

        async def noted(message: Message) -> None:
            nonlocal good
            if message["type"] == "http.response.start":
                good = message["status"] == 200 and NOT_KEPT not in message["headers"]
            else:
                parts.append(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, noted)
        if good and checkpoint is self.engine.checkpoint:  # not reloaded meanwhile
            self.engine.responses.put(key, b"".join(parts))
