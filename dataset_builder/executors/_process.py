"""One worker process, seen from its parent."""

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

from vramcast.dataset_builder.child_process import KILL_SECONDS, last_lines, signal_name
from vramcast.dataset_builder.executors import _worker
from vramcast.dataset_builder.measure._base import BackendResult
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UserError, WorkerError
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

CHUNK_SECONDS = 0.05
"""Chunks grow until they take this long: far more than it takes to send one, and not long to wait for."""
LARGEST_CHUNK = 64
TICK_SECONDS = 1.0
"""How often workers are looked after when nothing comes: a child that one of them forked may hide its death."""
JOIN_SECONDS = 0.002
SINGLE_THREADED = dict.fromkeys(
    (
        "OMP_NUM_THREADS",  # torch too
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)


class WorkerProcess:
    """A process that is sent a backend, then specs, and answers in their order."""

    def __init__(self, backend: bytes) -> None:
        self.backend = backend
        """What it is sent first, pickled."""
        self.assigned: deque[Spec] = deque()
        """Specs that it has not answered yet; it works on the first."""
        self.ready = False
        self.answered = 0
        self.lost = False
        """True once the connection is found closed at the other end."""
        self._since = time.monotonic()
        self._chunk = 1
        self._busy_seconds: list[float] = []
        self._start()

    def _start(self) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="worker-", suffix=".log", delete=False)  # noqa: SIM115
        self.connection, theirs = multiprocessing.Pipe()
        # Linux signals the death of the thread that started a process, and it may end before this process.
        bind = threading.current_thread() is threading.main_thread()
        self.process = multiprocessing.get_context("spawn").Process(
            target=_worker.main,
            args=(theirs, Path(self._log.name), os.getpid(), bind),
            name="vramcast-worker",
        )
        with _single_threaded():
            self.process.start()
        theirs.close()
        self._readable, self._gone = select.poll(), select.poll()
        self._readable.register(self.connection.fileno(), select.POLLIN)
        self._gone.register(self.process.sentinel, select.POLLIN)

    def wanted(self) -> int:
        """How many specs to send now: none while there is enough to do."""
        if not self.ready or self.lost or len(self.assigned) > self._chunk // 2:
            return 0
        if self._busy_seconds:
            mean = sum(self._busy_seconds) / len(self._busy_seconds)
            fitting = int(CHUNK_SECONDS / max(mean, 1e-9))
            self._chunk = max(1, min(fitting, 2 * self._chunk, LARGEST_CHUNK))
            self._busy_seconds.clear()
        return self._chunk

    def assign(self, specs: list[Spec]) -> bool:
        """Send specs, unless the process turns out to be dead: then they are none of its business."""
        if not self.send(pickle.dumps(specs)):
            return False
        if not self.assigned:
            self._since = time.monotonic()
        self.assigned.extend(specs)
        return True

    def send(self, data: bytes) -> bool:
        """Send what is pickled already; False if nobody is there to receive it."""
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.lost = True
        return not self.lost

    def receive(self) -> list[tuple[Spec, BackendResult]]:
        """The outcomes that have arrived, without waiting for more."""
        arrived: list[tuple[Spec, BackendResult]] = []
        with contextlib.suppress(EOFError, OSError):
            while self._readable.poll(0):
                message = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - from our own worker
                arrived.extend(self._take(message))
            return arrived
        self.lost = True
        return arrived

    def _take(self, message: _worker.Message) -> Iterator[tuple[Spec, BackendResult]]:
        self._since = time.monotonic()
        match message:
            case _worker.Ready():
                self.ready = True
            case _worker.Finished(outcome, seconds):
                self.answered += 1
                self._busy_seconds.append(seconds)
                yield self.assigned.popleft(), outcome
            case _worker.Failed(reason, user_error=True):
                raise UserError(reason)
            case _worker.Failed(reason):
                raise WorkerError(
                    f"expected a worker process to load the backend and its specs, found {reason}: "
                    "make sure that their modules can be imported by name (PYTHONPATH)"
                )

    def seconds_on_spec(self) -> float:
        """How long it has worked on its first spec; rather too low, as answers arrive late."""
        return time.monotonic() - self._since if self.ready and self.assigned else 0.0

    def has_ended(self) -> bool:
        """True if the process is gone, or has closed all its files, which comes to the same."""
        return self.lost or bool(self._gone.poll(0)) or self.process.exitcode is not None

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have got so far as to lead a group

    def join(self, seconds: float) -> None:
        """Wait for the process. The `join` of multiprocessing hangs on one that has closed all its files."""
        until = time.monotonic() + seconds
        while self.process.exitcode is None and time.monotonic() < until:
            time.sleep(JOIN_SECONDS)

    def last_words(self) -> str:
        """How the process ended, in a line, with the last that it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4096))
        said = last_lines(self._log.read())
        ending = _ending(self.process.exitcode)
        return f"{ending}: {said[-EVIDENCE_LENGTH + len(ending) :]}" if said else ending

    def discard(self) -> None:
        """Let go of a killed process, and of all that belongs to it."""
        self.connection.close()
        self.join(KILL_SECONDS)
        if self.process.exitcode is not None:
            self.process.close()
        self._log.close()
        Path(self._log.name).unlink(missing_ok=True)


def patience_seconds(on_spec_seconds: float, limit_seconds: float | None) -> float:
    """How long to wait for a worker until it is looked after: until its spec is out of time, a tick at most."""
    left_seconds = TICK_SECONDS if limit_seconds is None else limit_seconds - on_spec_seconds
    return min(TICK_SECONDS, max(0.0, left_seconds))


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"worker ended with exit code {exit_code}"
    return f"worker killed by {signal_name(-exit_code)}"


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Let a process inherit one thread for each library: it must know before anything is imported."""
    before = {name: os.environ.get(name) for name in SINGLE_THREADED}
    os.environ.update(SINGLE_THREADED)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until a process is started and known; it inherits that, until it ignores Ctrl-C."""
    resource_tracker.ensure_running()  # its start would let interrupts through again (3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
