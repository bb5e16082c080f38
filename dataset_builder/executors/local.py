"""Measure specs in worker processes on this machine, with a time limit; dead workers are replaced."""

import atexit
import os
import pickle
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice

from vramcast.child.process import KILL_SECONDS, wait_for
from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.dataset_builder.executors._base import Executor, crashed, timed_out
from vramcast.dataset_builder.executors._worker_process import (
    TICK_SECONDS,
    WorkerProcess,
    interrupts_held,
    patience_seconds,
)
from vramcast.errors import UserError, WorkerError
from vramcast.jobs.spec import Spec

CHECK_SECONDS = 0.05
"""Interval between checks of workers while outcomes arrive."""
EXIT_SECONDS = 5.0
"""Time for workers to exit by themselves after the last spec."""
FAILED_STARTS = 3
DEATHS_ON_FIRST_SPEC = 10
"""After this many in a row the specs are not the cause, and the run ends."""


class LocalExecutor(Executor):
    """Measures in worker processes. The death of a worker affects one spec only.

    Workers are started as fresh interpreters, because a fork of a process with threads, such as torch's, may hang.
    Their output is evidence of a crash, and not printed.
    """

    def __init__(self, workers: int, timeout_seconds: float | None = None) -> None:
        if workers < 1:
            raise UserError(f"expected workers to be a whole number from 1, found {workers!r}: change it")
        if timeout_seconds is not None and not (isinstance(timeout_seconds, int | float) and timeout_seconds > 0):
            raise UserError(f"expected the time limit to be over 0 s, found {timeout_seconds!r}: change or drop it")
        self.workers = workers
        self.timeout_seconds = timeout_seconds

    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Measure specs in parallel; the time limit applies to one spec, without the start of its worker.

        A backend that needs devices has a worker for each of its lanes, and no more workers than lanes.
        """
        lanes = backend.lanes()
        backends = [backend] * self.workers if lanes is None else lanes[: self.workers]
        pool = _WorkerPool([pickle.dumps(item) for item in backends], specs, self.timeout_seconds)
        try:
            yield from pool.outcomes()
            pool.join()
        finally:
            pool.close()


class _SpecQueue:
    """Specs to measure; those that a dead worker left come first."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self._specs = iter(specs)
        self._returned: deque[Spec] = deque()

    def take(self, count: int) -> list[Spec]:
        """Return up to `count` specs; fewer only at the end."""
        taken = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        taken.extend(islice(self._specs, count - len(taken)))
        return taken

    def give_back(self, specs: Iterable[Spec]) -> None:
        """Return specs for another worker."""
        self._returned.extend(specs)


class _WorkerPool:
    """The workers of one run."""

    def __init__(self, backends: Sequence[bytes], specs: Iterable[Spec], timeout_seconds: float | None) -> None:
        self._free_backends = deque(backends)
        """Backends without a worker."""
        self._queue = _SpecQueue(specs)
        self._timeout_seconds = timeout_seconds
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._deaths_on_first_spec = 0
        self._checked = 0.0
        self._owner = os.getpid()
        atexit.register(self.close)  # a generator may be closed when the interpreter is half gone

    def outcomes(self) -> Iterator[tuple[Spec, BackendResult]]:
        """Yield all outcomes. Workers get new specs before the caller gets outcomes, so that neither waits."""
        finished: list[tuple[Spec, BackendResult]] = []
        while self._distribute():
            yield from finished
            finished = self._collect()
        yield from finished

    def _distribute(self) -> bool:
        """Assign specs to workers with few; return False if no specs are left and none are being measured."""
        while self._free_backends and (first := self._queue.take(1)):
            self._assign(self._start_worker(), first)
        for worker in self._workers:
            if (wanted := worker.wanted()) and (specs := self._queue.take(wanted)):
                self._assign(worker, specs)
        return any(worker.assigned or worker.lost for worker in self._workers)

    def _start_worker(self) -> WorkerProcess:
        with interrupts_held():
            self._workers.append(WorkerProcess(self._free_backends.popleft()))
        return self._workers[-1]

    def _assign(self, worker: WorkerProcess, specs: list[Spec]) -> None:
        if not worker.assign(specs):
            self._queue.give_back(specs)

    def _collect(self) -> list[tuple[Spec, BackendResult]]:
        """Wait for messages and return the outcomes among them."""
        finished: list[tuple[Spec, BackendResult]] = []
        for worker in self._active():
            finished += self._receive(worker)
        if not finished or time.monotonic() > self._checked + CHECK_SECONDS:
            for worker in list(self._workers):
                finished += self._check(worker)
            self._checked = time.monotonic()
        return finished

    def _active(self) -> Iterable[WorkerProcess]:
        """Return the workers that have sent something or died."""
        workers = {worker.child: worker for worker in self._workers}
        longest = max((worker.seconds_on_spec() for worker in self._workers), default=0.0)
        patience = patience_seconds(longest, self._timeout_seconds)
        return [workers[child] for child in wait_for(workers, patience)]

    def _receive(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        starting = not worker.ready
        finished = worker.receive()
        if starting and worker.ready:
            self._failed_starts = 0
        if finished:
            self._deaths_on_first_spec = 0
        return finished

    def _check(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        """Replace a worker that died or exceeded the time limit."""
        if worker.has_ended():
            return self._record_death(worker)
        if self._timeout_seconds is not None and worker.seconds_on_spec() > self._timeout_seconds:
            return self._stop(worker, timed_out(self._timeout_seconds))
        return []

    def _record_death(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        """Record a worker's death as a crash of its first spec, and return the other specs to the queue."""
        worker.child.wait(TICK_SECONDS)  # its connection closes before its exit code is available
        finished = self._end(worker)
        if not worker.ready:
            self._failed_starts += 1
            _end_run_after(self._failed_starts, FAILED_STARTS, worker, "while they started")
        elif worker.assigned:
            finished.append((worker.assigned.popleft(), crashed(worker.describe_end())))
            self._deaths_on_first_spec += not worker.finished
            _end_run_after(self._deaths_on_first_spec, DEATHS_ON_FIRST_SPEC, worker, "on their first spec")
        self._remove(worker)
        return finished

    def _stop(self, worker: WorkerProcess, outcome: BackendResult) -> list[tuple[Spec, BackendResult]]:
        """Kill a worker that exceeded the time limit, unless its outcome arrives at the last moment."""
        count = worker.finished
        finished = self._end(worker)
        if worker.finished == count:
            finished.append((worker.assigned.popleft(), outcome))
        self._remove(worker)
        return finished

    def _end(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        """Kill a worker and return the outcomes that it had sent."""
        worker.kill()
        worker.child.wait(KILL_SECONDS)
        return self._receive(worker)

    def _remove(self, worker: WorkerProcess) -> None:
        self._queue.give_back(worker.assigned)
        self._free_backends.append(worker.backend)
        self._workers.remove(worker)
        worker.discard()

    def join(self) -> None:
        """Wait for workers to exit by themselves."""
        until = time.monotonic() + EXIT_SECONDS
        for worker in self._workers:
            worker.child.close_requests()
        for worker in self._workers:
            worker.child.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Kill all workers."""
        if os.getpid() != self._owner:  # a fork of this process, which does not own the workers
            return
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        while self._workers:
            self._workers.pop().discard()


def _end_run_after(count: int, limit: int, worker: WorkerProcess, when: str) -> None:
    if count >= limit:
        raise WorkerError(
            f"expected workers to measure specs, found {count} in a row that died {when} "
            f"({worker.describe_end()}): debug it with executor=serial, and keep the main module importable"
        )
