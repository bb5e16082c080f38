"""Tasks on a Ray cluster: rows go wherever there is room, and again where a node was lost. Ray is known here alone."""

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vramcast.dataset_builder.executors._base import Executor, crashed, describe
from vramcast.dataset_builder.executors._hosted import Died, Job, measure, versions
from vramcast.dataset_builder.measure._base import Backend, BackendResult
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UserError, WorkerError, check_count
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

try:
    import ray
    from ray import exceptions as failures
except ImportError as error:
    raise UserError("expected Ray for executor=ray, found none: pip install 'vramcast[ray]'") from error

TICK_SECONDS = 1.0
REFRESH_SECONDS = 5.0
"""How often the nodes of the cluster are counted."""
REACH_SECONDS = 10.0
TASKS_A_SLOT = 2
"""One at work and one on its way, so that no slot waits for the driver."""
NODE_DEATHS = 10
"""So many nodes lost under one spec, and it is the spec that takes them down."""
FAILED_STARTS = 3
CRASHES_IN_A_ROW = 10
"""So many specs, and it is not the specs: the run ends."""
CANCEL_SECONDS = 20.0
"""For a host to end its worker with all that this started: on a busy node it may take seconds to be heard."""
OBJECT_STORE_BYTES = 100_000_000
"""Of a cluster started here: specs and outcomes are a few KB each, and Ray would take 30 % of the memory."""
_LOST_NODE = (failures.NodeDiedError, failures.LocalRayletDiedError, failures.ObjectLostError)


@dataclass(frozen=True)
class RayExecutor(Executor):
    """Measures in tasks of a Ray cluster, each of which hosts a worker process of the local executor.

    In a program that has called `ray.init` itself, its connection is used and left open; `address` and
    `runtime_env` are those of the connection then.
    """

    address: str | None = None
    """Of a cluster, or 'auto' for the one that this machine belongs to; None starts one here, and ends it."""
    cpus: float = 1
    gpus: int = 0
    retries: int = 2
    """How often a spec is tried again whose process died. A lost node is not held against it."""
    timeout_seconds: float | None = None
    in_flight: int | None = None
    """How many specs Ray has at a time; None is twice what the cluster has room for."""
    wait_seconds: float = 0.0
    """How long to wait for a node with room for a spec, where no node has: an autoscaler may bring one."""
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.address is not None and not (isinstance(self.address, str) and self.address):
            raise UserError(f"expected executor.address to be HOST:PORT or auto, found {self.address!r}: change it")
        _check_number("cpus", self.cpus, above=0)
        check_count("executor.gpus", self.gpus, least=0)  # a share of a card would have others in its figures
        check_count("executor.retries", self.retries, least=0)
        _check_number("wait_seconds", self.wait_seconds)
        if self.timeout_seconds is not None:
            _check_number("timeout_seconds", self.timeout_seconds, above=0)
        if self.in_flight is not None:
            check_count("executor.in_flight", self.in_flight)
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise UserError(
                f"expected executor.runtime_env to have keys, found {self.runtime_env!r}: see docs/cluster.md"
            )

    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Measure specs on the cluster; the time limit is that of one spec, without the start of its worker."""
        job = Job(pickle.dumps(backend), self.timeout_seconds, keep=self.gpus == 0, versions=versions())
        with _connected(self):
            run = _Run(self, job, specs)
            try:
                yield from run.outcomes()
            finally:
                run.cancel()

    def slots(self) -> int:
        """How many specs the nodes that are up can measure at the same time."""
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return sum(self._fitting(held.get("CPU", 0), held.get("GPU", 0)) for held in resources)

    def _fitting(self, cpus: float, gpus: float) -> int:
        by_cpu = math.floor(cpus / self.cpus)
        return min(by_cpu, math.floor(gpus / self.gpus)) if self.gpus else by_cpu


def _check_number(name: str, value: Any, above: float | None = None) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or value == above:
        least = "over 0" if above == 0 else "from 0"
        raise UserError(f"expected executor.{name} to be a number {least}, found {value!r}: change it")


@contextlib.contextmanager
def _connected(executor: RayExecutor) -> Iterator[None]:
    """A connection to the cluster; its end takes along all that the run still has there."""
    if ray.is_initialized():
        yield
        return
    try:
        _connect(executor.address, dict(executor.runtime_env or {}))
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None, runtime_env: dict[str, Any]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change that is none here
    cores = len(os.sched_getaffinity(0))
    fresh = {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        _reach(address or "")
        with _sigterm_kept():
            # 'local' rather than None, for which Ray would take RAY_ADDRESS from the environment
            ray.init(
                address or "local",
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else fresh),
            )
    except (OSError, RuntimeError, ValueError, TypeError, failures.RayError) as error:
        raise UserError(
            f"expected a Ray cluster at executor.address={address or 'null'}, found {describe(error)}: "
            "start one with ray start --head, set its RAY_AUTH_TOKEN here too, or leave the address out"
        ) from error


def _reach(address: str) -> None:
    """Find out at once whether somebody listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray puts a handler of its own in the place of the program's."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@dataclass
class _Task:
    """A spec on its way, and what has become of its attempts so far."""

    spec: Spec
    deaths: int = 0
    lost_nodes: int = 0

    def lose_node(self, words: str) -> BackendResult | None:
        """The outcome of a spec whose node was lost; None if it is to be tried again."""
        self.lost_nodes += 1
        return crashed(_times(self.lost_nodes, words)) if self.lost_nodes >= NODE_DEATHS else None

    def die(self, words: str, retries: int) -> BackendResult | None:
        """The outcome of a spec whose process died; None if it is to be tried again."""
        self.deaths += 1
        return crashed(_times(self.deaths, words)) if self.deaths > retries else None


class _Run:
    """The tasks of one run."""

    def __init__(self, executor: RayExecutor, job: Job, specs: Iterable[Spec]) -> None:
        self._executor = executor
        self._job = job
        self._fresh = iter(specs)
        self._again: deque[_Task] = deque()
        self._under_way: dict[Any, _Task] = {}
        self._room = _Room(executor)
        self._failed_starts = 0
        self._crashes = 0
        # Attempts are counted here. No call limit: the host never touches a card, its worker does.
        options = {"num_cpus": executor.cpus, "num_gpus": executor.gpus, "max_retries": 0, "max_calls": 0}
        self._measure = ray.remote(**options)(measure)

    def outcomes(self) -> Iterator[tuple[Spec, BackendResult]]:
        """All outcomes. The cluster gets new specs before the caller gets outcomes, so that neither waits."""
        finished: list[tuple[Spec, BackendResult]] = []
        while self._submit():
            yield from finished
            finished = [(task.spec, outcome) for task, outcome in self._collect()]
        yield from finished

    def _submit(self) -> bool:
        """Hand specs to Ray as far as there is room; False when there is none left and none under way."""
        while len(self._under_way) < self._room.in_flight() and (task := self._next()):
            self._under_way[self._measure.remote(self._job, task.spec)] = task
        return bool(self._under_way)

    def _next(self) -> _Task | None:
        if self._again:
            return self._again.popleft()
        return next(map(_Task, self._fresh), None)

    def _collect(self) -> Iterator[tuple[_Task, BackendResult]]:
        """Wait for tasks to end; those that came to nothing go back."""
        under_way = list(self._under_way)
        if not ray.wait(under_way, timeout=TICK_SECONDS)[0]:
            return
        ended, _ = ray.wait(under_way, num_returns=len(under_way), timeout=0)
        for reference in ended:
            task = self._under_way.pop(reference)
            if outcome := self._outcome(task, reference):
                yield task, outcome
            else:
                self._again.append(task)

    def _outcome(self, task: _Task, reference: Any) -> BackendResult | None:
        """What became of a task; None if it is to be tried again."""
        try:
            answer: BackendResult | Died = ray.get(reference)
        except failures.RayTaskError as error:
            raise _cause(error) from None
        except failures.RuntimeEnvSetupError as error:
            raise UserError(f"expected a runtime_env that Ray can set up, found {describe(error)}: mend it") from error
        except _LOST_NODE as error:
            self._room.forget()
            return task.lose_node(describe(error))
        except failures.RayError as error:  # the host died
            answer = Died(describe(error), loaded=True)
        if isinstance(answer, Died):
            return self._died(task, answer)
        self._failed_starts = self._crashes = 0
        return answer

    def _died(self, task: _Task, died: Died) -> BackendResult | None:
        if not died.loaded:
            self._failed_starts += 1
            _refuse_to_go_on(self._failed_starts, FAILED_STARTS, "workers in a row that died while they started", died)
            return None
        outcome = task.die(died.words, self._executor.retries)
        self._crashes += outcome is not None
        _refuse_to_go_on(self._crashes, CRASHES_IN_A_ROW, "specs in a row whose workers died", died)
        return outcome

    def cancel(self) -> None:
        """End all that is under way: hosts are interrupted, so that they end their workers with all that these started.

        A host that does not listen is killed. Then Ray kills its worker, and nobody the children of that.
        """
        left = list(self._under_way)
        for force in (False, True):
            for reference in left:
                with contextlib.suppress(failures.RayError):
                    ray.cancel(reference, force=force)
            if left:
                _, left = ray.wait(left, num_returns=len(left), timeout=CANCEL_SECONDS)
        self._under_way.clear()


class _Room:
    """How many specs the cluster can take, as its nodes come and go."""

    def __init__(self, executor: RayExecutor) -> None:
        self._executor = executor
        self._slots = 0
        self._counted: float | None = None
        self._none_since: float | None = None

    def in_flight(self) -> int:
        """How many specs to have under way."""
        now = time.monotonic()
        if self._counted is None or now > self._counted + REFRESH_SECONDS:
            self._slots, self._counted = self._executor.slots(), now
            self._give_up_without_room(now)
        return self._executor.in_flight or max(1, TASKS_A_SLOT * self._slots)  # one tells an autoscaler what is missing

    def forget(self) -> None:
        """Have the nodes counted again."""
        self._counted = None

    def _give_up_without_room(self, now: float) -> None:
        if self._slots:
            self._none_since = None
            return
        self._none_since = now if self._none_since is None else self._none_since
        if self._executor.address is None or now - self._none_since >= self._executor.wait_seconds:
            raise UserError(
                f"expected a node with {self._executor.cpus:g} CPU and {self._executor.gpus} GPU to be free for a row, "
                f"found none in {ray.cluster_resources()}: add one, or change executor.cpus or executor.gpus"
            )


def _cause(error: failures.RayTaskError) -> Exception:
    """What a task raised concerns all specs: `measure` makes an outcome of everything else."""
    if isinstance(error.cause, UserError | WorkerError):
        return error.cause
    return WorkerError(
        f"expected tasks to find vramcast and the backend on their node, found {describe(error.cause)}: "
        "install them there, or name them in executor.runtime_env"
    )


def _times(attempts: int, words: str) -> str:
    return words if attempts == 1 else f"{attempts} attempts, at last: {words}"[:EVIDENCE_LENGTH]


def _refuse_to_go_on(count: int, limit: int, what: str, died: Died) -> None:
    if count >= limit:
        raise WorkerError(
            f"expected workers to measure specs, found {count} {what} ({died.words}): look at it with executor=serial"
        )
