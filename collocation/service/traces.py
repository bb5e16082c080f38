"""Traces of jobs: simulated in worker processes, shared by the requests that wait for one, and cached."""

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.service import tracing
from vramcast.collocation.service.byte_cache import ByteCache, content_key
from vramcast.collocation.service.metrics import ServiceMetrics
from vramcast.collocation.service.settings import Limits
from vramcast.collocation.service.tracing import TracedJob
from vramcast.collocation.service.worker_pool import (
    AbandonedError,
    LostError,
    OverloadedError,
    PoolError,
    PoolLimits,
    Waiters,
    WorkerPool,
)
from vramcast.errors import UserError
from vramcast.jobs.spec import LayerTable
from vramcast.simulation.result import Curve, Simulation

_SIMULATED, _REFUSED = b"S", b"R"
"""How a trace ended. Refusals are cached too, since the same network is refused again."""
_OUTCOMES = {LostError: "lost", AbandonedError: "abandoned", OverloadedError: "overloaded", PoolError: "failed"}


_Function = Callable[[tracing.TraceQuestion], Any]


@dataclass(eq=False)
class _Trace:
    """A trace under way, and the requests that wait for it."""

    task: "asyncio.Task[bytes]"
    waiters: Waiters


class Traces:
    """The traces that all requests share."""

    def __init__(self, workers: int, limits: Limits, metrics: ServiceMetrics) -> None:
        self.cache = ByteCache(limits.trace_cache_bytes)
        self.pool = WorkerPool(workers, _pool_limits(limits), tracing.__name__)
        self._limits = limits
        self._metrics = metrics
        self._under_way: dict[bytes, _Trace] = {}
        self._names: dict[str, list[str]] | None = None

    def is_sound(self, job: TracedJob, device: str) -> bool:
        """Return True if a job has been simulated on a device, and was not refused."""
        trace = self.cache.get(_key(tracing.trace, job, (device,)))
        return trace is not None and trace[:1] != _REFUSED

    async def simulation(self, job: TracedJob, devices: tuple[str, ...]) -> Simulation:
        """Return the simulation of a job: cached, of a trace that another request waits for, or of a new one."""
        simulation: Simulation = await self._result(tracing.trace, job, devices)
        return simulation

    async def curve(self, job: TracedJob, device: str) -> Curve:
        """Return the memory over the steps of a job on a device."""
        curve: Curve = await self._result(tracing.trace_curve, job, (device,))
        return curve

    async def table(self, job: NamedJob) -> LayerTable:
        """Return the layers of a named network, which are the same for all trainings with the same adapter."""
        table: LayerTable = await self._result(tracing.trace_table, job, ())
        return table

    async def names(self) -> dict[str, list[str]]:
        """Return the names of networks by library."""
        if self._names is None:
            self._names = await self.pool.run(partial(tracing.network_names))
        return self._names

    async def _result(self, function: _Function, job: TracedJob, devices: tuple[str, ...]) -> Any:
        key = _key(function, job, devices)
        trace = self.cache.get(key)
        self._metrics.cached.labels("traces", "miss" if trace is None else "hit").inc()
        if trace is None:
            under_way = self._under_way.get(key) or self._start_trace(key, function, job, devices)
            with under_way.waiters:
                trace = await asyncio.shield(under_way.task)  # the trace continues while others wait for it
        if trace[:1] == _REFUSED:
            raise UserError(trace[1:].decode())
        return pickle.loads(trace[1:])  # noqa: S301 - from our own worker

    def _start_trace(self, key: bytes, function: _Function, job: TracedJob, devices: tuple[str, ...]) -> _Trace:
        waiters = Waiters()
        limits = self._limits
        question = tracing.TraceQuestion(job, devices, limits.layers, limits.layer_passes)
        task = asyncio.create_task(self._trace(key, partial(function, question), waiters))
        self._under_way[key] = trace = _Trace(task, waiters)
        task.add_done_callback(lambda _: self._trace_ended(key, task))
        return trace

    def _trace_ended(self, key: bytes, task: "asyncio.Task[bytes]") -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()  # an abandoned trace has nobody to read it

    async def _trace(self, key: bytes, call: Callable[[], Any], waiters: Waiters) -> bytes:
        try:
            trace = _SIMULATED + await self.pool.run_pickled(call, waiters)
        except (LostError, AbandonedError, OverloadedError, PoolError) as error:  # it may go well another time
            self._metrics.traces.labels(_OUTCOMES[type(error)]).inc()
            raise
        except UserError as error:
            trace = _REFUSED + str(error).encode()
        self._metrics.traces.labels("traced" if trace[:1] == _SIMULATED else "refused").inc()
        self.cache.put(key, trace)
        return trace


def _pool_limits(limits: Limits) -> PoolLimits:
    return PoolLimits(
        waiting=limits.waiting_traces,
        seconds=limits.trace_seconds,
        abandoned_seconds=limits.abandoned_seconds,
        worker_bytes=limits.worker_bytes,
    )


def _key(function: _Function, job: TracedJob, devices: tuple[str, ...]) -> bytes:
    """Return the key of a result. Of the training, layers depend on the adapter alone."""
    name = job.id
    if function is tracing.trace_table and isinstance(job, NamedJob):
        name = f"{job.network} {job.training.adapter} {job.training.quantize}"
    return content_key(function.__name__.encode(), name.encode(), *(item.encode() for item in devices))
