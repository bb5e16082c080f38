"""Discrete events: jobs arrive, start, reach their peak, crash or finish. Nothing is random, and ties have an order."""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, islice

from vramcast.collocation.observed_peak import reservation_bytes
from vramcast.collocation.simulator.free_memory import CLOSED, free_memory
from vramcast.collocation.simulator.rules import EXCLUSIVE, HEAD_OF_LINE, OBSERVED, ClusterRules
from vramcast.collocation.simulator.workload import Submission, TraceJob
from vramcast.errors import UserError


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt at a job, as it went."""

    submission: Submission
    gpus: tuple[int, ...]
    start_s: float
    end_s: float
    peak_s: float | None
    """When it had all its memory; None for one that crashed on the way."""
    exclusive: bool

    @property
    def crashed(self) -> bool:
        """Whether it ran out of memory."""
        return self.peak_s is None


class _Event(IntEnum):
    """In the order in which they happen where they happen at once: what leaves makes room for what comes."""

    FINISH = 0
    PEAK = 1
    RETRY = 2
    ARRIVAL = 3


@dataclass(eq=False)
class _Attempt:
    """A job on its GPUs."""

    submission: Submission
    gpus: tuple[int, ...]
    reserved_bytes: int
    exclusive: bool
    start_s: float
    left_s: float
    """What is left of it, in seconds of running alone, at `seen_s`; since then it runs at `rate`."""
    seen_s: float
    rate: float = 0.0
    peak_s: float | None = None
    plan: int = 0
    """Counts changes of speed: an end that was foreseen before the last one is void."""

    @property
    def job(self) -> TraceJob:
        return self.submission.job


@dataclass(eq=False)
class _SimulatedGpu:
    """What is on a GPU: what the scheduler believes, and what is true."""

    attempts: list[_Attempt] = field(default_factory=list)
    reserved_bytes: int = 0
    used_bytes: int = 0


def simulate(
    submissions: Sequence[Submission], needs_bytes: Mapping[str, int], rules: ClusterRules
) -> list[AttemptRecord]:
    """Run a trace to its end; `needs_bytes` says what each job asks for on each of its GPUs. Runs in order of end."""
    for job in {item.job.name: item.job for item in submissions}.values():
        _check_runs(job, rules)
    return _Cluster(needs_bytes, rules).run(submissions)


def _check_runs(job: TraceJob, rules: ClusterRules) -> None:
    """Refuse what could not run if it had the cluster to itself: it would wait, or crash, forever."""
    if job.gpus > rules.gpus:
        raise UserError(f"expected {job.gpus} GPUs or more for {job.name}, found {rules.gpus}: raise --gpus")
    if job.peak_bytes > rules.capacity_bytes:
        raise UserError(
            f"expected a card that {job.name} fits on, with {job.peak_bytes} bytes, found {rules.capacity_bytes}: "
            "name a larger --device, or leave the job out"
        )


class _Cluster:
    """All state of a simulation."""

    def __init__(self, needs_bytes: Mapping[str, int], rules: ClusterRules) -> None:
        self.needs_bytes = needs_bytes
        self.remembered_bytes: dict[str, int] = {}
        self.rules = rules
        self.gpus = [_SimulatedGpu() for _ in range(rules.gpus)]
        self.free = free_memory(rules.policy, rules.gpus, rules.capacity_bytes)
        self.events: list[tuple[float, int, int, int, Submission | _Attempt]] = []
        self.order = count()
        self.retries: deque[Submission] = deque()
        self.waiting: deque[Submission] = deque()
        self.runs: list[AttemptRecord] = []
        self.now_s = 0.0

    def run(self, submissions: Sequence[Submission]) -> list[AttemptRecord]:
        for submission in submissions:
            self._foresee(submission.arrival_s, _Event.ARRIVAL, submission)
        while self.events:
            self.now_s = self.events[0][0]
            while self.events and self.events[0][0] == self.now_s:
                _, kind, _, plan, what = heapq.heappop(self.events)
                self._happen(_Event(kind), what, plan)
            self._place_waiting()
        return self.runs

    def _foresee(self, time_s: float, kind: _Event, what: Submission | _Attempt, plan: int = 0) -> None:
        heapq.heappush(self.events, (time_s, kind, next(self.order), plan, what))

    def _happen(self, kind: _Event, what: Submission | _Attempt, plan: int) -> None:
        if isinstance(what, Submission):
            (self.retries if kind is _Event.RETRY else self.waiting).append(what)
        elif kind is _Event.PEAK:
            self._peak(what)
        elif plan == what.plan:
            self._leave(what)

    def _place_waiting(self) -> None:
        """Start what finds a place: crashed jobs first, then in order of arrival."""
        for queue, exclusive in ((self.retries, True), (self.waiting, self.rules.policy == EXCLUSIVE)):
            if self.rules.queue == HEAD_OF_LINE:
                while queue and self._place(queue[0], exclusive):
                    queue.popleft()
                if queue:
                    return
            else:
                self._backfill(queue, exclusive)

    def _backfill(self, queue: deque[Submission], exclusive: bool) -> None:
        if self.free.choose(1, 1) is None:
            return  # nothing is free anywhere
        placed: list[int] = []
        least_refused: dict[int, int] = {}  # by number of GPUs; what asks for more needs not be tried
        for index, submission in enumerate(islice(queue, self.rules.backfill_depth)):
            gpus, need_bytes = submission.job.gpus, self._need_bytes(submission, exclusive)
            if need_bytes >= least_refused.get(gpus, self.rules.capacity_bytes + 1):
                continue
            if self._place(submission, exclusive):
                placed.append(index)
            else:
                least_refused[gpus] = need_bytes
        for index in reversed(placed):
            del queue[index]

    def _place(self, submission: Submission, exclusive: bool) -> bool:
        need_bytes = self._need_bytes(submission, exclusive)
        gpus = self.free.choose(need_bytes, submission.job.gpus)
        if gpus is None:
            return False
        self._start(_Attempt(submission, gpus, need_bytes, exclusive, self.now_s, submission.job.solo_s, self.now_s))
        return True

    def _need_bytes(self, submission: Submission, exclusive: bool) -> int:
        """What asks for more than the card gets a card of its own; what asks for nothing would fit on a closed one."""
        name, most_bytes = submission.job.name, self.rules.capacity_bytes
        need_bytes = most_bytes if exclusive else self.remembered_bytes.get(name, self.needs_bytes[name])
        return max(1, min(need_bytes, most_bytes))

    def _start(self, attempt: _Attempt) -> None:
        for gpu in (self.gpus[index] for index in attempt.gpus):
            gpu.attempts.append(attempt)
            gpu.reserved_bytes += attempt.reserved_bytes
        # a job that is over before would have reached its peak on the way
        after_s = min(self.rules.peak_after_s, attempt.job.solo_s / 2)
        self._foresee(self.now_s + after_s, _Event.PEAK, attempt)
        self._changed(attempt)

    def _peak(self, attempt: _Attempt) -> None:
        """It takes what it needs, or dies where there is not so much: those that have theirs keep it."""
        gpus = [self.gpus[index] for index in attempt.gpus]
        if any(gpu.used_bytes + attempt.job.peak_bytes > self.rules.capacity_bytes for gpu in gpus):
            self._leave(attempt)
            self._foresee(self.now_s + self.rules.retry_after_s, _Event.RETRY, attempt.submission)
            return
        attempt.peak_s = self.now_s
        if self.rules.remember:
            self.remembered_bytes[attempt.job.name] = reservation_bytes(attempt.job.peak_bytes)
        for index, gpu in zip(attempt.gpus, gpus, strict=True):
            gpu.used_bytes += attempt.job.peak_bytes
            self._tell_free(index)

    def _leave(self, attempt: _Attempt) -> None:
        attempt.plan += 1
        for gpu in (self.gpus[index] for index in attempt.gpus):
            gpu.attempts.remove(attempt)
            gpu.reserved_bytes -= attempt.reserved_bytes
            gpu.used_bytes -= attempt.job.peak_bytes if attempt.peak_s is not None else 0
        found = attempt
        self.runs.append(
            AttemptRecord(found.submission, found.gpus, found.start_s, self.now_s, found.peak_s, found.exclusive)
        )
        self._changed(attempt)

    def _changed(self, attempt: _Attempt) -> None:
        """After an attempt came or went: what is free on its GPUs, and how fast all that is there runs now."""
        touched: dict[_Attempt, None] = {}
        for index in attempt.gpus:
            self._tell_free(index)
            touched.update(dict.fromkeys(self.gpus[index].attempts))
        for other in touched:
            self._set_rate(other)

    def _set_rate(self, attempt: _Attempt) -> None:
        """A job on several GPUs keeps step with the fullest of them."""
        rate = self.rules.rate(max(len(self.gpus[index].attempts) for index in attempt.gpus))
        if rate == attempt.rate:
            return
        attempt.left_s -= (self.now_s - attempt.seen_s) * attempt.rate
        attempt.seen_s, attempt.rate, attempt.plan = self.now_s, rate, attempt.plan + 1
        self._foresee(self.now_s + max(0.0, attempt.left_s) / rate, _Event.FINISH, attempt, attempt.plan)

    def _tell_free(self, index: int) -> None:
        self.free.set(index, self._free_bytes(self.gpus[index]))

    def _free_bytes(self, gpu: _SimulatedGpu) -> int:
        """What the scheduler believes to be free."""
        if any(attempt.exclusive for attempt in gpu.attempts):
            return CLOSED
        if self.rules.ledger == OBSERVED:
            settling = any(attempt.peak_s is None for attempt in gpu.attempts)
            return CLOSED if settling else self.rules.capacity_bytes - gpu.used_bytes
        return self.rules.capacity_bytes - gpu.reserved_bytes
