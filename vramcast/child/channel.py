"""The child's side: requests from the standard input, reports on a pipe, and an end with the parent."""

import ctypes
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from vramcast.child.messages import Decoder, encode

Answer = tuple[dict[str, Any], bytes | None]
"""A message and its payload."""
GRACE_SECONDS = 0.5
"""Time for a child to end by itself after its parent has ended: less than the second of `alarm` below."""
PIPE_BYTES = 65_536
"""Capacity of a pipe on Linux: one read empties it (pipe(7))."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Channel:
    """The connection to the parent. It takes over the standard input: other code that reads there finds it empty."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # programs that are started here must not hold it open
        self._reports, self._requests = descriptor, os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._decoder = Decoder(math.inf)
        self._arrived: deque[dict[str, Any]] = deque()

    def report(self, event: str, payload: bytes | None = None, **values: Any) -> None:
        """Send a message."""
        self.write(encode({"event": event, **values}, payload))

    def write(self, data: bytes) -> None:
        """Send encoded messages."""
        while data:
            data = data[os.write(self._reports, data) :]

    def next_request(self) -> dict[str, Any] | None:
        """Wait for the next request; None after the parent has closed its end."""
        while not self._arrived:
            data = os.read(self._requests, PIPE_BYTES)  # not buffered: a thread that waits here holds no lock
            if not data:
                return None
            self._arrived.extend(self._decoder.feed(data))
            if self._decoder.fault is not None:
                raise RuntimeError(f"expected requests of the parent, found another input: {self._decoder.fault}")
        return self._arrived.popleft()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield requests until the parent closes its end."""
        return iter(self.next_request, None)

    def serve(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        """Answer each request; a copy of this process that foreign code forked, and let return, ends here."""
        process = os.getpid()
        for request in self.requests():
            message, payload = answer(request)
            if os.getpid() != process:
                os._exit(0)
            self.write(encode(message, payload))

    def inbox(self, parent: int) -> "SimpleQueue[dict[str, Any] | None]":
        """Read requests in a thread, and end with the parent; None stands for the end of the input.

        The parent is noticed to have ended while a request is worked on. A parent that lives and has closed its end
        of the pipe did so on purpose, and ends this process itself.
        """
        inbox: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

        def receive() -> None:
            with suppress(OSError):
                for request in self.requests():
                    inbox.put(request)
            inbox.put(None)
            time.sleep(GRACE_SECONDS)
            while os.getppid() == parent:
                time.sleep(GRACE_SECONDS)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=receive, daemon=True).start()
        return inbox

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._reports)
        os.close(self._requests)


def end_with_parent() -> None:
    """Have Linux end this process a second after its parent, even while C code holds the interpreter lock.

    The handler of the signal is alarm(2) itself. Called with SIGHUP, which is 1, it gives the thread of `inbox` one
    second to kill the children of this process. SIGKILL would leave them behind, and a Python handler would need the
    lock.
    """
    with suppress(OSError, AttributeError):  # not Linux
        libc = ctypes.CDLL(None)
        prctl, handler = libc.prctl, ctypes.cast(libc.alarm, ctypes.c_void_p)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGHUP, handler)
        prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
