"""The HTTP server: uvicorn with signals, slow clients and TLS."""

import asyncio
import gc
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vramcast.collocation.service import logs
from vramcast.collocation.service.app import make_app
from vramcast.collocation.service.guard import Guard
from vramcast.collocation.service.settings import Settings
from vramcast.errors import UserError

_SWITCH_SECONDS = 0.001
"""How long the thread of the forward pass may keep the event loop waiting for the GIL; the default is 5 ms."""

_GC_THRESHOLD = 50_000
"""Allocations between collections: a large request makes tens of thousands of objects, and no cycles."""


def serve(settings: Settings) -> None:
    """Serve until a signal ends it; requests under way are finished."""
    logs.set_up()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a slow client costs one, and may have many
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = HttpServer(settings, make_app(settings))
    gc.collect()
    gc.set_threshold(_GC_THRESHOLD)
    gc.freeze()  # torch leaves half a million objects: a collection that visits them blocks the event loop
    server.run()


class HttpServer(uvicorn.Server):
    """A uvicorn server of one process with one event loop."""

    def __init__(self, settings: Settings, guard: Guard) -> None:
        self.guard = guard
        limits = settings.limits
        protocol = type("Protocol", (TimeLimitedProtocol,), {"header_seconds": limits.header_seconds})
        super().__init__(
            uvicorn.Config(
                guard,
                host=settings.host,
                port=settings.port,
                http=protocol,
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(limits.shutdown_seconds),
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT, which end the service with exit code 0, and SIGHUP, which reloads it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._keep(asyncio.ensure_future(self._reload())))
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _keep(self, task: "asyncio.Future[None]") -> None:
        self._reloading = task  # an event loop keeps only weak references

    async def _reload(self) -> None:
        with suppress(UserError, OSError):  # see the log and /readyz
            await self.guard.engine.reload()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Log the address once the port is known."""
        await super().startup(sockets)
        for server in self.servers if self.started else []:
            for item in server.sockets:
                logs.event("serving", address=item.getsockname()[0], port=item.getsockname()[1])

    def handle_exit(self, sig: int, frame: object) -> None:
        """Log the signal, and stop."""
        logs.event("stopping", signal=signal.Signals(sig).name)
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


class TimeLimitedProtocol(HttpToolsProtocol):
    """HTTP with a time limit for headers: uvicorn itself waits for them without limit."""

    header_seconds = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        """Wait for the headers of a further request on the same connection."""
        super().on_message_begin()
        if self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Stop waiting: the body has a time limit of its own."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
