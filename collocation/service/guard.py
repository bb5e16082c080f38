"""Checks before every request: size, time, number and token; and its log line and metrics."""

import asyncio
import gc
import hmac
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress

from vramcast.collocation.service.answers import problem_bytes
from vramcast.collocation.service.body_reader import BodyReader, ClientLeftError, RequestRefusedError
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.history import LOOKUPS, Lookups
from vramcast.collocation.service.logs import LOGGER, event
from vramcast.collocation.service.response_cache import Application, Message, Receive, ResponseCache, Scope, Send

ALWAYS = ("/healthz", "/readyz", "/metrics")
"""Paths that are answered under overload too, because they report it."""
UNAVAILABLE = (b"vramcast-history", b"unavailable")
"""The header of a response without the history, because its database did not answer."""
RETRY_SECONDS = 1
_COLLECTED_BYTES = 2**24
"""Bodies between two collections of garbage. A refused body stays in a cycle of its exception and its request, and
the collector counts objects, not bytes."""


class Guard:
    """Pure ASGI, since a cached response takes little longer than its middleware."""

    def __init__(self, app: Application, engine: Engine, paths: Collection[str]) -> None:
        self.app = app
        self.cache = ResponseCache(app, engine)
        self.engine = engine
        self.metrics = engine.metrics
        settings = engine.settings
        self.limits = settings.limits
        self.paths = frozenset(paths)
        """Other paths are counted as one: a metric for each path that a client can invent would fill the memory."""
        self.log_requests = settings.log_requests
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._uncollected_bytes = 0
        self.bodies = BodyReader(self.limits)
        self.large = asyncio.Semaphore(self.limits.large_requests)
        self.metrics.watch("vramcast_requests_in_flight", "Requests being answered", lambda: self.in_flight)
        self.metrics.watch("vramcast_bodies_in_flight", "Bodies being received", lambda: len(self.bodies))
        self._token = settings.token.encode() if settings.token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, lookups = time.perf_counter(), 0, Lookups()
        LOOKUPS.set(lookups)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if lookups.unavailable:
                    message = {**message, "headers": [*message["headers"], UNAVAILABLE]}
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        except RequestRefusedError as refused:
            await refuse(watched, refused.status, str(refused))
        except ClientLeftError:
            status = status or 499  # as nginx logs it; nobody is there to receive a response
        except Exception:
            LOGGER.exception("failed", extra={"fields": {"path": scope["path"][:200]}})
            if not status:
                await refuse(watched, 500, "expected to answer, found an error of the service's own: see its log")
        finally:
            self._count(scope, status, time.perf_counter() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self._check_room(path, 0)
        headers = dict(scope["headers"])
        if self._token and path.startswith("/v1/") and not self._is_allowed(headers.get(b"authorization", b"")):
            raise RequestRefusedError(
                401, "expected 'Authorization: Bearer TOKEN', found no token or another: send the service's"
            )
        if scope["method"] in ("GET", "HEAD"):
            with self._counted(0):
                await self.app(scope, receive, send)
            return
        body = await self.bodies.read(headers, receive)
        self._check_room(path, len(body))
        with self._counted(len(body)):
            key = self.cache.key(scope, body)
            cached = None if key is None else await self.cache.get(key)
            if cached is not None:
                await self.cache.replay(path, cached, send)
            else:
                await self._run(scope, body, key, receive, send)

    def _check_room(self, path: str, size_bytes: int) -> None:
        most = self.limits.in_flight
        if path in ALWAYS:
            return
        too_large = size_bytes and self.in_flight_bytes + size_bytes > max(self.limits.in_flight_bytes, size_bytes)
        if self.in_flight >= most or too_large:
            raise RequestRefusedError(503, f"expected at most {most} requests at once, found more: come back soon")

    @contextmanager
    def _counted(self, size_bytes: int) -> Iterator[None]:
        self.in_flight += 1
        self.in_flight_bytes += size_bytes
        try:
            yield
        finally:
            self.in_flight -= 1
            self.in_flight_bytes -= size_bytes
            self._uncollected_bytes += size_bytes
            if self._uncollected_bytes > _COLLECTED_BYTES:
                self._uncollected_bytes = 0
                gc.collect()

    async def _run(self, scope: Scope, body: bytes, key: bytes | None, receive: Receive, send: Send) -> None:
        """Run the application until it has answered, or the client leaves."""
        leaving = asyncio.ensure_future(_client_leaves(receive))
        sent = False

        async def replayed() -> Message:
            nonlocal sent
            if sent:
                await leaving
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def answer() -> None:
            async with self.large if len(body) > self.limits.inline_body_bytes else nullcontext():
                if key is None:
                    await self.app(scope, replayed, send)
                else:
                    await self.cache.fill(key, scope, replayed, send)

        answering = asyncio.ensure_future(answer())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientLeftError
            await answering
        finally:
            leaving.cancel()
            answering.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answering

    def _is_allowed(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._token or b"")

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


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
