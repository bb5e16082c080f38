"""Learns from PostgreSQL which jobs other replicas changed, so that cached peaks are never old."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Engine

from vramcast.collocation.service.storage import CHANNEL

_PAUSE_SECONDS = 1.0
"""Between two attempts to connect, and between two questions whether the connection still lives."""


class Listener:
    """A thread with a connection of its own, which calls `connected` and `changed`. psycopg is an extra."""

    def __init__(
        self, engine: Engine, connected: Callable[[bool], None], changed: Callable[[Sequence[bytes]], None]
    ) -> None:
        self._engine = engine
        self._connected = connected
        self._changed = changed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, soon."""
        self._closing.set()

    def _run(self) -> None:
        import psycopg  # noqa: PLC0415

        while not self._closing.is_set():
            try:
                arguments: dict[str, Any] = dict(self._engine.dialect.create_connect_args(self._engine.url)[1])
                arguments |= {"autocommit": True, "connect_timeout": 2, "tcp_user_timeout": 3000}
                with psycopg.connect(**arguments) as there:
                    there.execute(f"LISTEN {CHANNEL}")
                    self._connected(True)
                    while not self._closing.is_set():
                        for note in there.notifies(timeout=_PAUSE_SECONDS):
                            self._changed([bytes.fromhex(text) for text in note.payload.split(",")])
                        there.execute("SELECT 1")  # a connection that was cut shows it only when it is used
            except (psycopg.Error, OSError, ValueError):
                self._connected(False)
                self._closing.wait(_PAUSE_SECONDS)
        self._connected(False)
