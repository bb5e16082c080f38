"""A worker process as its parent sees it."""

import math
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import spawn, util
from typing import Any

from vramcast.child.messages import DONE, FAILED, READY, REFUSED
from vramcast.child.process import Child, module_command, signal_name, wait_for
from vramcast.dataset_builder.backends._base import BackendResult
from vramcast.errors import UserError, WorkerError
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

CHUNK_SECONDS = 0.05
"""Chunks grow until they take this long: much longer than sending one, and short enough to wait for."""
LARGEST_CHUNK = 64
TICK_SECONDS = 1.0
"""Interval between checks of idle workers: a forked child of a worker may hide the worker's death."""
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

    def __init__(self, backend: bytes, *, with_main: bool = True) -> None:
        """Start it.

        Args:
            backend: The pickled backend.
            with_main: Import the main module of this process in the worker, which may define the backend.
        """
        self.backend = backend
        self.assigned: deque[Spec] = deque()
        """Specs without an outcome; the process works on the first."""
        self.ready = False
        self.finished = 0
        self._since = time.monotonic()
        self._chunk = 1
        self._busy_seconds: list[float] = []
        self._log = tempfile.TemporaryFile(prefix="worker-")  # noqa: SIM115 - lives as long as the process
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self.child = Child(
            module_command("vramcast.dataset_builder.executors._worker_main", flags=flags),
            {**os.environ, **SINGLE_THREADED},
            math.inf,
            log=self._log,
        )
        # Linux signals the end of the thread that started a process, which may end before this process.
        bind = threading.current_thread() is threading.main_thread()
        request = {"parent": os.getpid(), "bind": bind, "preparation": _preparation(with_main=with_main)}
        self.child.send(request, backend)

    @property
    def lost(self) -> bool:
        """True after the process has closed a pipe."""
        return self.child.is_deaf or self.child.is_silent

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
        if self.child.is_silent or not self.child.send({"do": "measure"}, pickle.dumps(specs)):
            return False
        if not self.assigned:
            self._since = time.monotonic()
        self.assigned.extend(specs)
        return True

    def receive(self) -> list[tuple[Spec, BackendResult]]:
        """Return the outcomes that have arrived, without waiting."""
        arrived: list[tuple[Spec, BackendResult]] = []
        while wait_for([self.child], 0):
            for message in self.child.messages():
                arrived.extend(self._process(message))
        return arrived

    def _process(self, message: Mapping[str, Any]) -> Iterator[tuple[Spec, BackendResult]]:
        self._since = time.monotonic()
        if message["event"] == READY:
            self.ready = True
        elif message["event"] == DONE:
            self.finished += 1
            self._busy_seconds.append(message["seconds"])
            yield self.assigned.popleft(), pickle.loads(message["payload"])  # noqa: S301 - from our own worker
        elif message["event"] == REFUSED:
            raise UserError(message["reason"])
        elif message["event"] == FAILED:
            raise WorkerError(
                f"expected a worker process to load the backend and its specs, found {message['reason']}: "
                "make sure that their modules can be imported by name (PYTHONPATH)"
            )

    def seconds_on_spec(self) -> float:
        """Return how long it has worked on its first spec; a lower bound, because outcomes arrive late."""
        return time.monotonic() - self._since if self.ready and self.assigned else 0.0

    def has_ended(self) -> bool:
        """Return True if the process has ended or has closed its pipes."""
        return self.lost or self.child.has_ended()

    def kill(self) -> None:
        """Kill the process and all processes that it started, without waiting for their end."""
        self.child.kill()

    def describe_end(self) -> str:
        """Return one line: how the process ended, and the last lines that it printed."""
        end, output = _describe_exit(self.child.exit_code), self.child.last_output
        return f"{end}: {output[-EVIDENCE_LENGTH + len(end) :]}" if output else end

    def discard(self) -> None:
        """Release a killed process, its pipes and its log."""
        self.child.end_now()
        self._log.close()


def _preparation(*, with_main: bool) -> dict[str, Any]:
    """Return the description of this process with which `multiprocessing` prepares a spawned one."""
    names = ["sys_path", "sys_argv", "dir", "orig_dir"]
    names += ["init_main_from_name", "init_main_from_path"] if with_main else []
    preparation = spawn.get_preparation_data("vramcast-worker")
    return {name: preparation[name] for name in names if name in preparation}


def patience_seconds(on_spec_seconds: float, limit_seconds: float | None) -> float:
    """Return how long to wait before the next check of a worker: until its spec times out, one tick at most."""
    left_seconds = TICK_SECONDS if limit_seconds is None else limit_seconds - on_spec_seconds
    return min(TICK_SECONDS, max(0.0, left_seconds))


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"worker ended with exit code {exit_code}"
    return f"worker killed by {signal_name(-exit_code)}"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT until a process is started and registered; the process inherits the mask until it ignores SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
