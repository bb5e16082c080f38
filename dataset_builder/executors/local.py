"""Worker processes on this machine: a core each, under a time limit, replaced when they die."""

import atexit
import os
import pickle
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

from vramcast.dataset_builder.child_process import KILL_SECONDS
from vramcast.dataset_builder.executors._base import Executor, crashed, timed_out
from vramcast.dataset_builder.executors._process import TICK_SECONDS, WorkerProcess, interrupts_held, patience_seconds
from vramcast.dataset_builder.measure._base import Backend, BackendResult
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UserError, WorkerError

CHECK_SECONDS = 0.05
"""How often workers are looked after while outcomes keep coming."""
LEAVE_SECONDS = 5.0
"""What workers are given to end by themselves when all is done."""
FAILED_STARTS = 3
DEATHS_ON_FIRST_SPEC = 10
"""So many in a row, and it is not the specs: the run ends."""


class LocalExecutor(Executor):
    """Measures in worker processes. Whatever happens to a worker concerns one spec alone.

    Workers are started as fresh interpreters, for a fork of a process with threads (torch has some) may hang.
    What they print is kept as evidence of a crash, and not shown.
    """

    def __init__(self, workers: int, timeout_seconds: float | None = None) -> None:
        if workers < 1:
            raise UserError(f"expected workers to be a whole number from 1, found {workers!r}: change it")
        if timeout_seconds is not None and not (isinstance(timeout_seconds, int | float) and timeout_seconds > 0):
            raise UserError(f"expected the time limit to be over 0 s, found {timeout_seconds!r}: change or drop it")
        self.workers = workers
        self.timeout_seconds = timeout_seconds

    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Measure specs in parallel; the time limit is that of one spec, without the start of its worker.

        A backend that needs devices is pinned: a worker to each of its lanes, and no more workers than lanes.
        """
        lanes = backend.lanes()
        backends = [backend] * self.workers if lanes is None else lanes[: self.workers]
        crew = _Crew([pickle.dumps(item) for item in backends], specs, self.timeout_seconds)
        try:
            yield from crew.outcomes()
            crew.let_go()
        finally:
            crew.close()


class _Queue:
    """Specs to come, those that a dead worker left behind first."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self._fresh = iter(specs)
        self._returned: deque[Spec] = deque()

    def take(self, count: int) -> list[Spec]:
        """At most so many specs; fewer only at the end."""
        taken = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        taken.extend(islice(self._fresh, count - len(taken)))
        return taken

    def give_back(self, specs: Iterable[Spec]) -> None:
        """Have specs measured by another worker."""
        self._returned.extend(specs)


class _Crew:
    """The workers of one run."""

    def __init__(self, backends: Sequence[bytes], specs: Iterable[Spec], timeout_seconds: float | None) -> None:
        self._unmanned = deque(backends)
        """The backends of workers that are still to be hired, or hired again."""
        self._queue = _Queue(specs)
        self._timeout_seconds = timeout_seconds
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._deaths_on_first_spec = 0
        self._checked = 0.0
        self._owner = os.getpid()
        # multiprocessing waits for its children when the interpreter ends; these would wait for us.
        atexit.register(self.close)

    def outcomes(self) -> Iterator[tuple[Spec, BackendResult]]:
        """All outcomes. Workers get new specs before the caller gets outcomes, so that neither waits."""
        finished: list[tuple[Spec, BackendResult]] = []
        while self._hand_out():
            yield from finished
            finished = self._collect()
        yield from finished

    def _hand_out(self) -> bool:
        """Give work to whoever has little; False when there is none left and none under way."""
        while self._unmanned and (first := self._queue.take(1)):
            self._assign(self._hire(), first)
        for worker in self._workers:
            if (wanted := worker.wanted()) and (specs := self._queue.take(wanted)):
                self._assign(worker, specs)
        return any(worker.assigned or worker.lost for worker in self._workers)

    def _hire(self) -> WorkerProcess:
        with interrupts_held():
            self._workers.append(WorkerProcess(self._unmanned.popleft()))
        self._workers[-1].send(self._workers[-1].backend)
        return self._workers[-1]

    def _assign(self, worker: WorkerProcess, specs: list[Spec]) -> None:
        if not worker.assign(specs):
            self._queue.give_back(specs)

    def _collect(self) -> list[tuple[Spec, BackendResult]]:
        """Wait for news, and return the outcomes among it."""
        finished: list[tuple[Spec, BackendResult]] = []
        for worker in self._awake():
            finished += self._receive(worker)
        if not finished or time.monotonic() > self._checked + CHECK_SECONDS:
            for worker in list(self._workers):
                finished += self._check(worker)
            self._checked = time.monotonic()
        return finished

    def _awake(self) -> Iterable[WorkerProcess]:
        """The workers that have sent something, or died."""
        channels: dict[Any, WorkerProcess] = {}
        for worker in self._workers:
            channels[worker.connection] = channels[worker.process.sentinel] = worker
        longest = max((worker.seconds_on_spec() for worker in self._workers), default=0.0)
        patience = patience_seconds(longest, self._timeout_seconds)
        return {channels[channel]: None for channel in wait(list(channels), patience)}

    def _receive(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        starting = not worker.ready
        finished = worker.receive()
        if starting and worker.ready:
            self._failed_starts = 0
        if finished:
            self._deaths_on_first_spec = 0
        return finished

    def _check(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        """See to a worker that died, or that works on its spec for too long."""
        if worker.has_ended():
            return self._bury(worker)
        if self._timeout_seconds is not None and worker.seconds_on_spec() > self._timeout_seconds:
            return self._stop(worker, timed_out(self._timeout_seconds))
        return []

    def _bury(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        """Blame a worker's death on the spec that it was working on, and take the others back."""
        worker.join(TICK_SECONDS)  # its connection closes a moment before its exit code is known
        finished = self._end(worker)
        if not worker.ready:
            self._failed_starts += 1
            _refuse_to_go_on(self._failed_starts, FAILED_STARTS, worker, "while they started")
        elif worker.assigned:
            finished.append((worker.assigned.popleft(), crashed(worker.last_words())))
            self._deaths_on_first_spec += not worker.answered
            _refuse_to_go_on(self._deaths_on_first_spec, DEATHS_ON_FIRST_SPEC, worker, "on their first spec")
        self._dismiss(worker)
        return finished

    def _stop(self, worker: WorkerProcess, outcome: BackendResult) -> list[tuple[Spec, BackendResult]]:
        """End a worker that is out of time, unless it answers at the last moment."""
        answered = worker.answered
        finished = self._end(worker)
        if worker.answered == answered:
            finished.append((worker.assigned.popleft(), outcome))
        self._dismiss(worker)
        return finished

    def _end(self, worker: WorkerProcess) -> list[tuple[Spec, BackendResult]]:
        """Kill a worker; what it had sent before still counts."""
        worker.kill()
        worker.join(KILL_SECONDS)
        return self._receive(worker)

    def _dismiss(self, worker: WorkerProcess) -> None:
        self._queue.give_back(worker.assigned)
        self._unmanned.append(worker.backend)
        self._workers.remove(worker)
        worker.discard()

    def let_go(self) -> None:
        """Let workers without work end by themselves."""
        until = time.monotonic() + LEAVE_SECONDS
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End all workers at once."""
        if os.getpid() != self._owner:  # a fork of this process, to which the workers do not belong
            return
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        while self._workers:
            self._workers.pop().discard()


def _refuse_to_go_on(count: int, limit: int, worker: WorkerProcess, when: str) -> None:
    if count >= limit:
        raise WorkerError(
            f"expected workers to measure specs, found {count} in a row that died {when} "
            f"({worker.last_words()}): look at it with executor=serial, and keep the main module importable"
        )
