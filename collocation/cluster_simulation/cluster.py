"""Discrete-event simulation of a cluster: jobs arrive, start, reach their peak, crash or finish.

Nothing is random, and events at the same time have an order.
"""

import heapq
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, islice

from vramcast.collocation.cluster_simulation.free_memory import CLOSED, free_memory
from vramcast.collocation.cluster_simulation.rules import EXCLUSIVE, HEAD_OF_LINE, OBSERVED, ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission, TraceJob
from vramcast.collocation.observed_peak import reservation_bytes
from vramcast.errors import UserError

_LATEST_S = 1e15
"""Thirty million years: products of times and bytes stay finite."""


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt at a job, after its end."""

    submission: Submission
    gpus: tuple[int, ...]
    start_s: float
    end_s: float
    peak_s: float | None
    """The time at which it had all its memory; None if it crashed before."""
    exclusive: bool

    @property
    def crashed(self) -> bool:
        """True if it ran out of memory."""
        return self.peak_s is None


class _Event(IntEnum):
    """Kinds of events, in their order at the same time: a job that leaves makes room for one that comes."""

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
    """Seconds of running alone that were left at `seen_s`; since then it runs at `rate`."""
    seen_s: float
    rate: float = 0.0
    peak_s: float | None = None
    plan: int = 0
    """Counts changes of speed: an end that was scheduled before the last change is void."""
    has_left: bool = False

    @property
    def job(self) -> TraceJob:
        return self.submission.job


@dataclass(eq=False)
class _SimulatedGpu:
    """The attempts on a GPU, the memory that is reserved for them, and the memory that they use."""

    attempts: list[_Attempt] = field(default_factory=list)
    reserved_bytes: int = 0
    used_bytes: int = 0


def simulate(
    submissions: Sequence[Submission], needs_bytes: Mapping[str, int], rules: ClusterRules
) -> list[AttemptRecord]:
    """Run a trace to its end, and return all attempts in order of their end.

    `needs_bytes` has the need of each job on each of its GPUs.
    """
    for job in {item.job.name: item.job for item in submissions}.values():
        _check_runs(job, rules)
    return _Cluster(needs_bytes, rules).run(submissions)


def _check_runs(job: TraceJob, rules: ClusterRules) -> None:
    """Refuse a job that could not run on an idle cluster: it would wait or crash forever."""
    if job.gpus > rules.gpus:
        raise UserError(f"expected {job.gpus} GPUs or more for {job.name}, found {rules.gpus}: raise --gpus")
    if job.peak_bytes > rules.capacity_bytes:
        raise UserError(
            f"expected a device with room for {job.name}, {job.peak_bytes} bytes, found {rules.capacity_bytes}: "
            "name a larger --device, or leave the job out"
        )


def _latest_s(submissions: Sequence[Submission]) -> float:
    """Return the latest time at which a float is exact to a thousandth of the shortest job."""
    shortest_s = min((item.job.solo_s for item in submissions), default=1.0)
    return min(shortest_s / 1000 / sys.float_info.epsilon, _LATEST_S)


class _Cluster:
    """The state of a simulation."""

    def __init__(self, needs_bytes: Mapping[str, int], rules: ClusterRules) -> None:
        self.needs_bytes = needs_bytes
        self.observed_bytes: dict[str, int] = {}
        self.rules = rules
        self.gpus = [_SimulatedGpu() for _ in range(rules.gpus)]
        self.free = free_memory(rules.policy, rules.gpus, rules.capacity_bytes)
        self.events: list[tuple[float, int, int, int, Submission | _Attempt]] = []
        self.order = count()
        self.retries: deque[Submission] = deque()
        self.waiting: deque[Submission] = deque()
        self.records: list[AttemptRecord] = []
        self.now_s = 0.0
        self.latest_s = math.inf

    def run(self, submissions: Sequence[Submission]) -> list[AttemptRecord]:
        self.latest_s = _latest_s(submissions)
        for submission in submissions:
            self._schedule(submission.arrival_s, _Event.ARRIVAL, submission)
        while self.events:
            self.now_s = self.events[0][0]
            while self.events and self.events[0][0] == self.now_s:
                _, kind, _, plan, what = heapq.heappop(self.events)
                self._happen(_Event(kind), what, plan)
            self._place_waiting()
        return self.records

    def _schedule(self, time_s: float, kind: _Event, what: Submission | _Attempt, plan: int = 0) -> None:
        if not time_s <= self.latest_s:  # nor NaN
            raise UserError(
                f"expected times of at most {self.latest_s:g} s, up to which floats resolve the shortest job, "
                f"found {time_s:g} s: shift the arrivals, leave out the shortest jobs, or lower --slowdown"
            )
        heapq.heappush(self.events, (time_s, kind, next(self.order), plan, what))

    def _happen(self, kind: _Event, what: Submission | _Attempt, plan: int) -> None:
        if isinstance(what, Submission):
            (self.retries if kind is _Event.RETRY else self.waiting).append(what)
        elif what.has_left:
            return
        elif kind is _Event.PEAK:
            self._peak(what)
        elif plan == what.plan:
            self._finish(what)

    def _finish(self, attempt: _Attempt) -> None:
        """End an attempt. It has its peak before its end, also if both are at the same time."""
        self._peak(attempt)
        if not attempt.has_left:
            self._leave(attempt)

    def _place_waiting(self) -> None:
        """Start the jobs that find a place: crashed jobs first, then in order of arrival."""
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
            return  # no GPU has free memory
        placed: list[int] = []
        least_refused: dict[int, int] = {}  # by number of GPUs; a job with a higher need is not tried
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
        """Return the need of a job: at most the capacity, and at least a byte, since 0 bytes fit on a closed GPU."""
        name, most_bytes = submission.job.name, self.rules.capacity_bytes
        need_bytes = most_bytes if exclusive else self.observed_bytes.get(name, self.needs_bytes[name])
        return max(1, min(need_bytes, most_bytes))

    def _start(self, attempt: _Attempt) -> None:
        for gpu in (self.gpus[index] for index in attempt.gpus):
            gpu.attempts.append(attempt)
            gpu.reserved_bytes += attempt.reserved_bytes
        # A short job reaches its peak halfway.
        after_s = min(self.rules.peak_after_s, attempt.job.solo_s / 2)
        self._schedule(self.now_s + after_s, _Event.PEAK, attempt)
        self._changed(attempt)

    def _peak(self, attempt: _Attempt) -> None:
        """Give an attempt its memory, or let it crash if there is too little: the others keep theirs."""
        if attempt.peak_s is not None:
            return
        gpus = [self.gpus[index] for index in attempt.gpus]
        if any(gpu.used_bytes + attempt.job.peak_bytes > self.rules.capacity_bytes for gpu in gpus):
            self._leave(attempt)
            self._schedule(self.now_s + self.rules.retry_after_s, _Event.RETRY, attempt.submission)
            return
        attempt.peak_s = self.now_s
        if self.rules.remember:
            self.observed_bytes[attempt.job.name] = reservation_bytes(attempt.job.peak_bytes)
        for index, gpu in zip(attempt.gpus, gpus, strict=True):
            gpu.used_bytes += attempt.job.peak_bytes
            self._update_free(index)

    def _leave(self, attempt: _Attempt) -> None:
        attempt.has_left = True
        for gpu in (self.gpus[index] for index in attempt.gpus):
            gpu.attempts.remove(attempt)
            gpu.reserved_bytes -= attempt.reserved_bytes
            gpu.used_bytes -= attempt.job.peak_bytes if attempt.peak_s is not None else 0
        self.records.append(
            AttemptRecord(
                attempt.submission, attempt.gpus, attempt.start_s, self.now_s, attempt.peak_s, attempt.exclusive
            )
        )
        self._changed(attempt)

    def _changed(self, attempt: _Attempt) -> None:
        """Update free memory and speeds on the GPUs of an attempt that came or left."""
        touched: dict[_Attempt, None] = {}
        for index in attempt.gpus:
            self._update_free(index)
            touched.update(dict.fromkeys(self.gpus[index].attempts))
        for other in touched:
            self._set_rate(other)

    def _set_rate(self, attempt: _Attempt) -> None:
        """Set the speed of an attempt; on several GPUs it is that of the fullest."""
        rate = self.rules.rate(max(len(self.gpus[index].attempts) for index in attempt.gpus))
        if rate == attempt.rate:
            return
        attempt.left_s -= (self.now_s - attempt.seen_s) * attempt.rate
        attempt.seen_s, attempt.rate, attempt.plan = self.now_s, rate, attempt.plan + 1
        self._schedule(self.now_s + max(0.0, attempt.left_s) / rate, _Event.FINISH, attempt, attempt.plan)

    def _update_free(self, index: int) -> None:
        self.free.set(index, self._free_bytes(self.gpus[index]))

    def _free_bytes(self, gpu: _SimulatedGpu) -> int:
        """Return the memory that the scheduler takes for free."""
        if any(attempt.exclusive for attempt in gpu.attempts):
            return CLOSED
        if self.rules.ledger == OBSERVED:
            settling = any(attempt.peak_s is None for attempt in gpu.attempts)
            return CLOSED if settling else self.rules.capacity_bytes - gpu.used_bytes
        return self.rules.capacity_bytes - gpu.reserved_bytes
