"""Measure specs in tasks on a Ray cluster; a spec whose node is lost runs again. Only this module imports Ray."""

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

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.dataset_builder.executors._base import Executor, crashed, describe
from vramcast.dataset_builder.executors._task_host import TaskSettings, WorkerDeath, measure, versions
from vramcast.errors import UserError, WorkerError, check_count
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH

try:
    import ray
    from ray import exceptions as failures
except ImportError as error:
    raise UserError("expected Ray for executor=ray, found none: pip install 'vramcast[ray]'") from error

TICK_SECONDS = 1.0
REFRESH_SECONDS = 5.0
"""Interval between counts of the cluster's nodes."""
REACH_SECONDS = 10.0
TASKS_PER_SLOT = 2
"""One running and one queued, so that no slot waits for the driver."""
NODE_DEATHS = 10
"""After this many lost nodes the spec is the cause, and counts as crashed."""
FAILED_STARTS = 3
CRASHES_IN_A_ROW = 10
"""After this many specs in a row the specs are not the cause, and the run ends."""
CANCEL_SECONDS = 20.0
"""Time for a host to end its worker and the worker's children; on a busy node this takes seconds."""
OBJECT_STORE_BYTES = 100_000_000
"""Object store of a cluster started here: specs and outcomes are a few KB each; Ray's default is 30 % of the memory."""
_LOST_NODE = (failures.NodeDiedError, failures.LocalRayletDiedError, failures.ObjectLostError)


@dataclass(frozen=True)
class RayExecutor(Executor):
    """Measures in tasks of a Ray cluster, each of which hosts a worker process of the local executor.

    If the program has called `ray.init` itself, its connection is used and left open, and `address` and `runtime_env`
    have no effect.
    """

    address: str | None = None
    """Address of a cluster, or 'auto' for the one of this machine; None starts a cluster here and ends it."""
    cpus: float = 1
    gpus: int = 0
    retries: int = 2
    """Number of retries of a spec whose process died. Lost nodes are not counted."""
    timeout_seconds: float | None = None
    in_flight: int | None = None
    """Number of specs that Ray holds at a time; None is twice the capacity of the cluster."""
    wait_seconds: float = 0.0
    """Time to wait for a node with enough resources for a spec, which an autoscaler may add."""
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.address is not None and not (isinstance(self.address, str) and self.address):
            raise UserError(f"expected executor.address to be HOST:PORT or auto, found {self.address!r}: change it")
        _check_number("cpus", self.cpus, above=0)
        check_count("executor.gpus", self.gpus, least=0)  # a shared GPU would include other processes
        check_count("executor.retries", self.retries, least=0)
        _check_number("wait_seconds", self.wait_seconds)
        if self.timeout_seconds is not None:
            _check_number("timeout_seconds", self.timeout_seconds, above=0)
        if self.in_flight is not None:
            check_count("executor.in_flight", self.in_flight)
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise UserError(
                f"expected executor.runtime_env to have keys, found {self.runtime_env!r}: see docs/building.md"
            )

    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Measure specs on the cluster; the time limit applies to one spec, without the start of its worker."""
        settings = TaskSettings(pickle.dumps(backend), self.timeout_seconds, keep=self.gpus == 0, versions=versions())
        with _connected(self):
            pool = _TaskPool(self, settings, specs)
            try:
                yield from pool.outcomes()
            finally:
                pool.cancel()

    def slots(self) -> int:
        """Return how many specs the live nodes can measure at the same time."""
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
    """Connect to the cluster; disconnecting ends all tasks of the run."""
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
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns
    cores = len(os.sched_getaffinity(0))
    fresh = {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        _reach(address or "")
        with _sigterm_kept():
            # not None, for which Ray would read RAY_ADDRESS
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
    """Raise OSError at once if nothing listens at HOST:PORT: Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@dataclass
class _Task:
    """A submitted spec and its failed attempts."""

    spec: Spec
    deaths: int = 0
    lost_nodes: int = 0

    def lose_node(self, reason: str) -> BackendResult | None:
        """Record a lost node; return an outcome, or None to try again."""
        self.lost_nodes += 1
        return crashed(_times(self.lost_nodes, reason)) if self.lost_nodes >= NODE_DEATHS else None

    def die(self, reason: str, retries: int) -> BackendResult | None:
        """Record a dead process; return an outcome, or None to try again."""
        self.deaths += 1
        return crashed(_times(self.deaths, reason)) if self.deaths > retries else None


class _TaskPool:
    """The tasks of one run."""

    def __init__(self, executor: RayExecutor, settings: TaskSettings, specs: Iterable[Spec]) -> None:
        self._executor = executor
        self._settings = settings
        self._specs = iter(specs)
        self._retries: deque[_Task] = deque()
        self._submitted: dict[Any, _Task] = {}
        self._capacity = _Capacity(executor)
        self._failed_starts = 0
        self._crashes = 0
        # Attempts are counted here. No limit of calls: only the worker uses the GPU, not the host.
        options = {"num_cpus": executor.cpus, "num_gpus": executor.gpus, "max_retries": 0, "max_calls": 0}
        self._measure = ray.remote(**options)(measure)

    def outcomes(self) -> Iterator[tuple[Spec, BackendResult]]:
        """Yield all outcomes. The cluster gets new specs before the caller gets outcomes, so that neither waits."""
        finished: list[tuple[Spec, BackendResult]] = []
        while self._submit():
            yield from finished
            finished = [(task.spec, outcome) for task, outcome in self._collect()]
        yield from finished

    def _submit(self) -> bool:
        """Submit specs up to the capacity; return False if no specs are left and none are submitted."""
        while len(self._submitted) < self._capacity.in_flight() and (task := self._next()):
            self._submitted[self._measure.remote(self._settings, task.spec)] = task
        return bool(self._submitted)

    def _next(self) -> _Task | None:
        if self._retries:
            return self._retries.popleft()
        return next(map(_Task, self._specs), None)

    def _collect(self) -> Iterator[tuple[_Task, BackendResult]]:
        """Wait for tasks to end; queue those without an outcome again."""
        submitted = list(self._submitted)
        if not ray.wait(submitted, timeout=TICK_SECONDS)[0]:
            return
        ended, _ = ray.wait(submitted, num_returns=len(submitted), timeout=0)
        for reference in ended:
            task = self._submitted.pop(reference)
            if outcome := self._outcome(task, reference):
                yield task, outcome
            else:
                self._retries.append(task)

    def _outcome(self, task: _Task, reference: Any) -> BackendResult | None:
        """Return the outcome of a task, or None to try again."""
        try:
            result: BackendResult | WorkerDeath = ray.get(reference)
        except failures.RayTaskError as error:
            raise _cause(error) from None
        except failures.RuntimeEnvSetupError as error:
            raise UserError(f"expected a runtime_env that Ray can set up, found {describe(error)}: fix it") from error
        except _LOST_NODE as error:
            self._capacity.forget()
            return task.lose_node(describe(error))
        except failures.RayError as error:  # the host died
            result = WorkerDeath(describe(error), loaded=True)
        if isinstance(result, WorkerDeath):
            return self._died(task, result)
        self._failed_starts = self._crashes = 0
        return result

    def _died(self, task: _Task, death: WorkerDeath) -> BackendResult | None:
        if not death.loaded:
            self._failed_starts += 1
            _end_run_after(self._failed_starts, FAILED_STARTS, "workers in a row that died while they started", death)
            return None
        outcome = task.die(death.reason, self._executor.retries)
        self._crashes += outcome is not None
        _end_run_after(self._crashes, CRASHES_IN_A_ROW, "specs in a row whose workers died", death)
        return outcome

    def cancel(self) -> None:
        """Cancel all tasks: hosts are interrupted, so that they kill their workers with the workers' children.

        A host that does not respond is killed. Ray then kills its worker, but not the worker's children.
        """
        left = list(self._submitted)
        for force in (False, True):
            for reference in left:
                with contextlib.suppress(failures.RayError):
                    ray.cancel(reference, force=force)
            if left:
                _, left = ray.wait(left, num_returns=len(left), timeout=CANCEL_SECONDS)
        self._submitted.clear()


class _Capacity:
    """The number of specs to submit, as nodes join and leave."""

    def __init__(self, executor: RayExecutor) -> None:
        self._executor = executor
        self._slots = 0
        self._counted: float | None = None
        self._none_since: float | None = None

    def in_flight(self) -> int:
        """Return how many specs to submit at a time."""
        now = time.monotonic()
        if self._counted is None or now > self._counted + REFRESH_SECONDS:
            self._slots, self._counted = self._executor.slots(), now
            self._check_slots(now)
        return self._executor.in_flight or max(1, TASKS_PER_SLOT * self._slots)  # a pending task is seen by autoscalers

    def forget(self) -> None:
        """Count the nodes again at the next query."""
        self._counted = None

    def _check_slots(self, now: float) -> None:
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
    """Return the error that a task raised; it affects all specs, because `measure` turns other errors into outcomes."""
    if isinstance(error.cause, UserError | WorkerError):
        return error.cause
    return WorkerError(
        f"expected tasks to find vramcast and the backend on their node, found {describe(error.cause)}: "
        "install them there, or name them in executor.runtime_env"
    )


def _times(attempts: int, reason: str) -> str:
    return reason if attempts == 1 else f"{attempts} attempts, the last: {reason}"[:EVIDENCE_LENGTH]


def _end_run_after(count: int, limit: int, what: str, death: WorkerDeath) -> None:
    if count >= limit:
        raise WorkerError(
            f"expected workers to measure specs, found {count} {what} ({death.reason}): debug it with executor=serial"
        )
