"""What stands before every request: bounds on size, time and number, the token, the log line, the metrics."""

import asyncio
import hmac
import logging
import time
from collections.abc import Collection

from vramcast.collocation.service.answers import problem_bytes
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.logs import LOGGER, event
from vramcast.collocation.service.response_cache import Application, Message, Receive, ResponseCache, Scope, Send

ALWAYS = ("/healthz", "/readyz", "/metrics")
"""Answered under overload too: they tell of it."""
RETRY_SECONDS = 1


class Refused(Exception):  # noqa: N818 - an outcome of reading, which never leaves this module
    """A request that is answered before anybody looks at it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Gone(Exception):  # noqa: N818
    """The client left before it had said everything."""


class Guard:
    """Pure ASGI, since a cached answer takes little longer than its middleware."""

    def __init__(self, app: Application, engine: Engine, paths: Collection[str]) -> None:
        self.app = app
        self.keeping = ResponseCache(app, engine)
        self.engine = engine
        self.metrics = engine.metrics
        settings = engine.settings
        self.limits = settings.limits
        self.paths = frozenset(paths)
        """Others are counted as one: a metric for each path that a client can think of would fill the memory."""
        self.log_requests = settings.log_requests
        self.in_flight = 0
        self.metrics.watch("vramcast_requests_in_flight", "Requests being answered", lambda: self.in_flight)
        self._token = settings.token.encode() if settings.token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.in_flight += 1
        try:
            await self._answer(scope, receive, watched)
        except Refused as refused:
            await refuse(watched, refused.status, str(refused))
        except Gone:
            status = 499  # nobody is there to be told; the number is nginx's
        except Exception:
            LOGGER.exception("failed", extra={"fields": {"path": scope["path"]}})
            if not status:
                await refuse(watched, 500, "expected to answer, found an error of the service's own: see its log")
        finally:
            self.in_flight -= 1
            self._count(scope, status, time.perf_counter() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self.in_flight > self.limits.in_flight and path not in ALWAYS:
            raise Refused(503, f"expected at most {self.limits.in_flight} requests at once, found more: come back soon")
        headers = dict(scope["headers"])
        if self._token and path.startswith("/v1/") and not self._is_allowed(headers.get(b"authorization", b"")):
            raise Refused(401, "expected 'Authorization: Bearer TOKEN', found no token or another: send the service's")
        if scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        body = await self._body(headers, receive)
        given = False

        async def replayed() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.keeping.answer(scope, body, replayed, send)

    def _is_allowed(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._token or b"")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """All of the body, within its bounds."""
        limit, stated = self.limits.body_bytes, headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > limit:
            raise Refused(413, f"expected a body of at most {limit} bytes, found {int(stated)}: send less at once")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise Refused(413, f"expected a body of at most {limit} bytes, found more: send less at once")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(
                408, f"expected the body within {self.limits.body_seconds:g} s, found part of it: send it faster"
            ) from None

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self.paths else "other"
        self.metrics.finished(path, status, seconds)
        if self.log_requests and LOGGER.isEnabledFor(logging.INFO):
            event(
                "request",
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                ms=round(1000 * seconds, 3),
                client=(scope.get("client") or ["?"])[0],
            )


async def refuse(send: Send, status: int, sentence: str) -> None:
    """Answer with a problem. A connection whose body was not read to its end cannot be used again."""
    body = problem_bytes(sentence)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (401, 408, 413, 503):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
