"""A time limit on a script that holds whatever the script does to its signals."""

import _thread
import ctypes
import sys
import threading
from collections.abc import Callable
from time import sleep

_FALLBACK_SECONDS = 1.0
"""For a main thread that waits outside of Python, such as in `sleep`: it runs no pending call."""
_CALL_FRAMES = 100
_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Deadline:
    """Calls a function when the time is over: in the main thread if that runs Python code, else in its own."""

    def __init__(self, seconds: float, reached: Callable[[], None]) -> None:
        self._seconds = min(seconds, threading.TIMEOUT_MAX)
        self._reached = reached
        self._pending = _PendingCall(self._call)

    def start(self) -> None:
        """Let the time run; the thread is none that `threading` lists."""
        _thread.start_new_thread(self._wait, ())

    def _wait(self) -> None:
        sleep(self._seconds)
        sys.setrecursionlimit(sys.getrecursionlimit() + _CALL_FRAMES)  # the script may have filled its stack
        ctypes.pythonapi.Py_AddPendingCall(self._pending, None)
        sleep(_FALLBACK_SECONDS)
        self._reached()

    def _call(self, _: object) -> int:
        self._reached()
        return 0
