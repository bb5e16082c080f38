"""The inside of a task on a cluster: a worker process of the local executor, hosted by the process that has the task.

The host measures nothing itself, so a crash or a hang of a spec is told by a process that goes on, in the same
words as on one machine. What can still take the host away is its node, or an end of memory.
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing.connection import wait
from types import ModuleType

from vramcast import __version__
from vramcast.dataset_builder.child_process import KILL_SECONDS
from vramcast.dataset_builder.executors._base import timed_out
from vramcast.dataset_builder.executors._process import TICK_SECONDS, WorkerProcess, patience_seconds
from vramcast.dataset_builder.measure._base import BackendResult
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import WorkerError

IDLE_SECONDS = 10.0
"""How long a worker is kept for another task."""


@dataclass(frozen=True)
class Job:
    """What the tasks of a run have in common."""

    backend: bytes
    timeout_seconds: float | None
    keep: bool
    """Whether a worker serves the next task too. On a card it must not: its context would be in the next figure."""
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Died:
    """A worker ended without an outcome."""

    words: str
    loaded: bool
    """False if it had not even loaded the backend: then the spec has no part in it."""


@cache
def versions() -> dict[str, str]:
    """What has to be the same on all nodes, since rows name one version alone."""
    return {"torch": version("torch"), "vramcast": __version__}


def measure(job: Job, spec: Spec) -> BackendResult | Died:
    """Measure one spec in a worker, the one that the last task left if there is one."""
    _require_versions(job.versions)
    worker = _assigned(job, spec)
    try:
        answer = _answer(worker, job.timeout_seconds)
    except BaseException:
        _end(worker)
        raise
    if job.keep and not worker.has_ended():
        _shelf.put(job, worker)
    else:
        _end(worker)
    return answer


def _assigned(job: Job, spec: Spec) -> WorkerProcess:
    """A worker that has the spec; one that died while it was kept is replaced."""
    if worker := _shelf.take(job):
        if not worker.has_ended() and worker.assign([spec]):
            return worker
        _end(worker)
    with _without_main():
        worker = WorkerProcess(job.backend)
    worker.send(worker.backend)
    worker.assign([spec])
    return worker


def _require_versions(expected: Mapping[str, str]) -> None:
    if (found := versions()) != expected:
        raise WorkerError(
            f"expected {dict(expected)} on every node, as here, found {found} on {os.uname().nodename}: "
            "install the same there"
        )


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running the program of the host, which is the cluster's, in its worker too."""
    host = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = host


def _answer(worker: WorkerProcess, limit_seconds: float | None) -> BackendResult | Died:
    while True:
        patience = patience_seconds(worker.seconds_on_spec(), limit_seconds)
        wait([worker.connection, worker.process.sentinel], patience)
        if found := worker.receive():
            return found[0][1]
        if worker.has_ended():
            return _last_answer(worker) or Died(worker.last_words(), worker.ready)
        if limit_seconds is not None and worker.seconds_on_spec() > limit_seconds:
            return _last_answer(worker) or timed_out(limit_seconds)


def _last_answer(worker: WorkerProcess) -> BackendResult | None:
    """Kill a worker; what it had sent before still counts."""
    if worker.has_ended():
        worker.join(TICK_SECONDS)  # its connection closes a moment before its exit code is known
    worker.kill()
    worker.join(KILL_SECONDS)
    return next((outcome for _, outcome in worker.receive()), None)


def _end(worker: WorkerProcess) -> None:
    worker.kill()
    worker.discard()


class _Shelf:
    """The worker that a task leaves to the next one, if that comes soon and has the same job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Job, WorkerProcess] | None = None
        self._timer = threading.Timer(0, self.clear)

    def put(self, job: Job, worker: WorkerProcess) -> None:
        """Keep a worker for a while."""
        with self._lock:
            self._kept = job, worker
            self._timer = threading.Timer(IDLE_SECONDS, self.clear)
            self._timer.daemon = True
            self._timer.start()

    def take(self, job: Job) -> WorkerProcess | None:
        """The worker that is kept; one of another job is ended."""
        if (kept := self._emptied()) is None:
            return None
        if kept[0] == job:
            return kept[1]
        _end(kept[1])
        return None

    def clear(self) -> None:
        """End the worker that is kept."""
        if kept := self._emptied():
            _end(kept[1])

    def _emptied(self) -> tuple[Job, WorkerProcess] | None:
        with self._lock:
            self._timer.cancel()
            kept, self._kept = self._kept, None
            return kept


_shelf = _Shelf()
# multiprocessing waits for its children when the interpreter ends; this one would wait for us.
atexit.register(_shelf.clear)
