"""The main function of a worker process: it receives a backend, then chunks of specs, and sends one outcome per spec.

Outcomes are sent in the order of the specs, so a dead worker was working on the first spec without one.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.dataset_builder.executors._base import attempt, crashed, describe
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.simulation.sandbox.child_process import PR_SET_PDEATHSIG

GRACE_SECONDS = 0.5
"""Time for a worker to end by itself after its parent has ended: less than the second of `alarm` below."""


@dataclass(frozen=True)
class Ready:
    """The backend is loaded."""


@dataclass(frozen=True)
class Finished:
    """The outcome of the next spec, and the time it took."""

    outcome: BackendResult
    seconds: float


@dataclass(frozen=True)
class Failed:
    """An error that affects all specs."""

    reason: str
    user_error: bool


Message = Ready | Finished | Failed


def main(connection: Connection, log_path: Path, parent: int, bind: bool) -> None:
    """Measure specs until the parent closes the connection or ends."""
    _leave_group()
    if bind:
        _bind_to_parent()
    log = _redirect_output(log_path)
    os.set_inheritable(connection.fileno(), False)  # programs that a spec starts must not keep it open
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox, parent), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended
        for message in _messages(inbox, log):
            connection.send_bytes(_pickled(message))


def _leave_group() -> None:
    """Start a process group that the parent can kill, and leave Ctrl-C to the parent."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent blocked it during the start


def _bind_to_parent() -> None:
    """Have Linux end this process a second after its parent, even while C code holds the interpreter lock.

    The handler of the signal is alarm(2) itself. Called with SIGHUP, which is 1, it gives `_receive` one second to kill
    the children of this process. SIGKILL would leave them behind, and a Python handler would need the lock.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        libc = ctypes.CDLL(None)
        prctl, handler = libc.prctl, ctypes.cast(libc.alarm, ctypes.c_void_p)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGHUP, handler)
        prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)


def _redirect_output(log_path: Path) -> int:
    """Redirect the output to a log, which is evidence if this process dies."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    log_path.unlink()  # the parent has it open; an unlinked file cannot be left behind
    os.dup2(log, 1)
    os.dup2(log, 2)
    return log


def _receive(connection: Connection, inbox: "SimpleQueue[bytes | None]", parent: int) -> None:
    """Drain the connection, so that the parent never blocks on sending, and end with the parent."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv_bytes())
    inbox.put(None)
    time.sleep(GRACE_SECONDS)
    while os.getppid() == parent:  # it closed the connection on purpose, and ends this process itself
        time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _messages(inbox: "SimpleQueue[bytes | None]", log: int) -> Iterator[Message]:
    """Load the backend, then measure the specs that arrive."""
    try:
        if (settings := inbox.get()) is None:
            return
        backend = pickle.loads(settings)  # noqa: S301 - only the parent writes to the connection
        yield Ready()
        while (chunk := inbox.get()) is not None:
            for spec in pickle.loads(chunk):  # noqa: S301
                os.ftruncate(log, 0)  # the log holds the output of one spec
                yield _measured(backend, spec)
    except UserError as error:
        yield Failed(str(error), user_error=True)
    except (Exception, SystemExit) as error:
        yield Failed(describe(error), user_error=False)


def _measured(backend: Backend, spec: Spec) -> Finished:
    start = time.perf_counter()
    return Finished(attempt(backend, spec), time.perf_counter() - start)


def _pickled(message: Message) -> bytes:
    """Pickle a message; an outcome that cannot be pickled counts as a crash of its spec."""
    try:
        return pickle.dumps(message)
    except Exception as error:
        seconds = message.seconds if isinstance(message, Finished) else 0.0
        return pickle.dumps(Finished(crashed(describe(error)), seconds))
