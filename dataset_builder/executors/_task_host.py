"""The function that a Ray task runs: it hosts a worker process of the local executor.

The host measures nothing itself, so it survives a crash or a hang of a spec and reports it as the local executor does.
Only the loss of its node, or a lack of host memory, ends the host.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

from vramcast.child.process import KILL_SECONDS, wait_for
from vramcast.dataset_builder.backends._base import BackendResult
from vramcast.dataset_builder.executors._base import timed_out
from vramcast.dataset_builder.executors._worker_process import TICK_SECONDS, WorkerProcess, patience_seconds
from vramcast.errors import WorkerError
from vramcast.jobs.spec import Spec
from vramcast.version import __version__

IDLE_SECONDS = 10.0
"""Time that an idle worker is kept for another task."""


@dataclass(frozen=True)
class TaskSettings:
    """The settings that all tasks of a run share."""

    backend: bytes
    timeout_seconds: float | None
    keep: bool
    """True if a worker serves the next task, too. On a GPU it must not: its context would be measured there."""
    versions: Mapping[str, str]


@dataclass(frozen=True)
class WorkerDeath:
    """A worker that ended without an outcome."""

    reason: str
    loaded: bool
    """False if it had not loaded the backend yet, so that the spec is not the cause."""


@cache
def versions() -> dict[str, str]:
    """Return the versions that all nodes must share, because rows record one version only."""
    return {"torch": version("torch"), "vramcast": __version__}


def measure(settings: TaskSettings, spec: Spec) -> BackendResult | WorkerDeath:
    """Measure one spec in a worker; reuse the worker of the last task if there is one."""
    _require_versions(settings.versions)
    worker = _assigned(settings, spec)
    try:
        outcome = _outcome(worker, settings.timeout_seconds)
    except BaseException:
        _end(worker)
        raise
    if settings.keep and not worker.has_ended():
        _idle_worker.put(settings, worker)
    else:
        _end(worker)
    return outcome


def _assigned(settings: TaskSettings, spec: Spec) -> WorkerProcess:
    """Return a worker with the spec assigned; an idle worker that has died is replaced."""
    if worker := _idle_worker.take(settings):
        if not worker.has_ended() and worker.assign([spec]):
            return worker
        _end(worker)
    worker = WorkerProcess(settings.backend, with_main=False)  # the main module is Ray's
    worker.assign([spec])
    return worker


def _require_versions(expected: Mapping[str, str]) -> None:
    if (installed := versions()) != expected:
        raise WorkerError(
            f"expected {dict(expected)} on every node, as here, found {installed} on {os.uname().nodename}: "
            "install the same there"
        )


def _outcome(worker: WorkerProcess, limit_seconds: float | None) -> BackendResult | WorkerDeath:
    while True:
        patience = patience_seconds(worker.seconds_on_spec(), limit_seconds)
        wait_for([worker.child], patience)
        if finished := worker.receive():
            return finished[0][1]
        if worker.has_ended():
            return _kill(worker) or WorkerDeath(worker.describe_end(), worker.ready)
        if limit_seconds is not None and worker.seconds_on_spec() > limit_seconds:
            return _kill(worker) or timed_out(limit_seconds)


def _kill(worker: WorkerProcess) -> BackendResult | None:
    """Kill a worker and return the outcome that it had sent, if any."""
    if worker.has_ended():
        worker.child.wait(TICK_SECONDS)  # its connection closes before its exit code is available
    worker.kill()
    worker.child.wait(KILL_SECONDS)
    return next((outcome for _, outcome in worker.receive()), None)


def _end(worker: WorkerProcess) -> None:
    worker.kill()
    worker.discard()


class _IdleWorker:
    """Keeps a worker for the next task if that starts soon and has the same settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: tuple[TaskSettings, WorkerProcess] | None = None
        self._timer = threading.Timer(0, self.clear)

    def put(self, settings: TaskSettings, worker: WorkerProcess) -> None:
        """Keep a worker for `IDLE_SECONDS`."""
        with self._lock:
            self._worker = settings, worker
            self._timer = threading.Timer(IDLE_SECONDS, self.clear)
            self._timer.daemon = True
            self._timer.start()

    def take(self, settings: TaskSettings) -> WorkerProcess | None:
        """Return the kept worker; end a worker of other settings."""
        if (entry := self._pop()) is None:
            return None
        if entry[0] == settings:
            return entry[1]
        _end(entry[1])
        return None

    def clear(self) -> None:
        """End the kept worker."""
        if entry := self._pop():
            _end(entry[1])

    def _pop(self) -> tuple[TaskSettings, WorkerProcess] | None:
        with self._lock:
            self._timer.cancel()
            entry, self._worker = self._worker, None
            return entry


_idle_worker = _IdleWorker()
