"""A worker process as its parent sees it."""

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

from vramcast.dataset_builder.backends._base import BackendResult
from vramcast.dataset_builder.executors import _worker_main
from vramcast.errors import UserError, WorkerError
from vramcast.jobs.spec import Spec
from vramcast.simulation.sandbox.child_process import KILL_SECONDS, last_lines, signal_name
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

CHUNK_SECONDS = 0.05
"""Chunks grow until they take this long: much longer than sending one, and short enough to wait for."""
LARGEST_CHUNK = 64
TICK_SECONDS = 1.0
"""Interval between checks of idle workers: a forked child of a worker may hide the worker's death."""
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
    """A process that receives a backend, then specs, and sends outcomes in their order."""

    def __init__(self, backend: bytes) -> None:
        self.backend = backend
        """The pickled backend."""
        self.assigned: deque[Spec] = deque()
        """Specs without an outcome; the process works on the first."""
        self.ready = False
        self.finished = 0
        self.lost = False
        """True after the process has closed the connection."""
        self._since = time.monotonic()
        self._chunk = 1
        self._busy_seconds: list[float] = []
        self._start()

    def _start(self) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="worker-", suffix=".log", delete=False)  # noqa: SIM115
        self.connection, child_end = multiprocessing.Pipe()
        # Linux signals the end of the thread that started a process, which may end before this process.
        bind = threading.current_thread() is threading.main_thread()
        self.process = multiprocessing.get_context("spawn").Process(
            target=_worker_main.main,
            args=(child_end, Path(self._log.name), os.getpid(), bind),
            name="vramcast-worker",
        )
        with _single_threaded():
            self.process.start()
        child_end.close()
        self._readable, self._gone = select.poll(), select.poll()
        self._readable.register(self.connection.fileno(), select.POLLIN)
        self._gone.register(self.process.sentinel, select.POLLIN)

    def wanted(self) -> int:
        """Return how many specs to send now; 0 while it has enough."""
        if not self.ready or self.lost or len(self.assigned) > self._chunk // 2:
            return 0
        if self._busy_seconds:
            mean = sum(self._busy_seconds) / len(self._busy_seconds)
            chunk = int(CHUNK_SECONDS / max(mean, 1e-9))
            self._chunk = max(1, min(chunk, 2 * self._chunk, LARGEST_CHUNK))
            self._busy_seconds.clear()
        return self._chunk

    def assign(self, specs: list[Spec]) -> bool:
        """Send specs; return False if the process has ended, and do not assign them."""
        if not self.send(pickle.dumps(specs)):
            return False
        if not self.assigned:
            self._since = time.monotonic()
        self.assigned.extend(specs)
        return True

    def send(self, data: bytes) -> bool:
        """Send pickled data; return False if the process has ended."""
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.lost = True
        return not self.lost

    def receive(self) -> list[tuple[Spec, BackendResult]]:
        """Return the outcomes that have arrived, without waiting."""
        arrived: list[tuple[Spec, BackendResult]] = []
        with contextlib.suppress(EOFError, OSError):
            while self._readable.poll(0):
                message = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - from our own worker
                arrived.extend(self._process(message))
            return arrived
        self.lost = True
        return arrived

    def _process(self, message: _worker_main.Message) -> Iterator[tuple[Spec, BackendResult]]:
        self._since = time.monotonic()
        match message:
            case _worker_main.Ready():
                self.ready = True
            case _worker_main.Finished(outcome, seconds):
                self.finished += 1
                self._busy_seconds.append(seconds)
                yield self.assigned.popleft(), outcome
            case _worker_main.Failed(reason, user_error=True):
                raise UserError(reason)
            case _worker_main.Failed(reason):
                raise WorkerError(
                    f"expected a worker process to load the backend and its specs, found {reason}: "
                    "make sure that their modules can be imported by name (PYTHONPATH)"
                )

    def seconds_on_spec(self) -> float:
        """Return how long it has worked on its first spec; a lower bound, because outcomes arrive late."""
        return time.monotonic() - self._since if self.ready and self.assigned else 0.0

    def has_ended(self) -> bool:
        """Return True if the process has ended or has closed all its files."""
        return self.lost or bool(self._gone.poll(0)) or self.process.exitcode is not None

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        if self.process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have started its process group yet

    def join(self, seconds: float) -> None:
        """Wait for the process. `Process.join` hangs if the process has closed all its files."""
        until = time.monotonic() + seconds
        while self.process.exitcode is None and time.monotonic() < until:
            time.sleep(JOIN_SECONDS)

    def describe_end(self) -> str:
        """Return one line: how the process ended, and the last lines that it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4096))
        output = last_lines(self._log.read())
        end = _describe_exit(self.process.exitcode)
        return f"{end}: {output[-EVIDENCE_LENGTH + len(end) :]}" if output else end

    def discard(self) -> None:
        """Release a killed process, its connection and its log."""
        self.connection.close()
        self.join(KILL_SECONDS)
        if self.process.exitcode is not None:
            self.process.close()
        self._log.close()
        Path(self._log.name).unlink(missing_ok=True)


def patience_seconds(on_spec_seconds: float, limit_seconds: float | None) -> float:
    """Return how long to wait before the next check of a worker: until its spec times out, one tick at most."""
    left_seconds = TICK_SECONDS if limit_seconds is None else limit_seconds - on_spec_seconds
    return min(TICK_SECONDS, max(0.0, left_seconds))


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"worker ended with exit code {exit_code}"
    return f"worker killed by {signal_name(-exit_code)}"


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Set one thread for each library in the environment that a new process inherits."""
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
    """Block SIGINT until a process is started and registered; the process inherits the mask until it ignores SIGINT."""
    resource_tracker.ensure_running()  # its start would unblock SIGINT (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
