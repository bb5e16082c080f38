"""uvicorn around the application: signals, slow clients, TLS."""

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
    """Serve until told to stop; requests that are under way are finished."""
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
    """One process, one event loop."""

    def __init__(self, settings: Settings, guard: Guard) -> None:
        self.guard = guard
        limits = settings.limits
        patient = type("Patient", (PatientProtocol,), {"header_seconds": limits.header_seconds})
        super().__init__(
            uvicorn.Config(
                guard,
                host=settings.host,
                port=settings.port,
                http=patient,
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
        """SIGTERM and SIGINT end it, with the exit code of work well done; SIGHUP reads the checkpoint again."""
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
        with suppress(UserError, OSError):  # told in the log and by /readyz
            await self.guard.engine.reload()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where, once the port is known."""
        await super().startup(sockets)
        for server in self.servers if self.started else []:
            for item in server.sockets:
                logs.event("serving", address=item.getsockname()[0], port=item.getsockname()[1])

    def handle_exit(self, sig: int, frame: object) -> None:
        """Say so, and stop."""
        logs.event("stopping", signal=signal.Signals(sig).name)
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


class PatientProtocol(HttpToolsProtocol):
    """Patient up to a point: uvicorn itself waits for headers as long as a client likes."""

    header_seconds = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first request."""
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        """A request begins, perhaps a further one on the same connection."""
        super().on_message_begin()
        if self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """What follows has a time limit of its own."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to wait for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
