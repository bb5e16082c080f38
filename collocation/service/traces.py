"""Traces of specs: simulated in worker processes, shared by the requests that wait for one, and cached."""

import asyncio
import pickle
from dataclasses import dataclass
from functools import partial

from vramcast.collocation.service import tracing
from vramcast.collocation.service.byte_cache import ByteCache, content_key
from vramcast.collocation.service.metrics import ServiceMetrics
from vramcast.collocation.service.settings import Limits
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
from vramcast.jobs.spec import Spec
from vramcast.simulation.result import Simulation

_SIMULATED, _REFUSED = b"S", b"R"
"""How a trace ended. Refusals are cached too, since the same network is refused again."""
_OUTCOMES = {LostError: "lost", AbandonedError: "abandoned", OverloadedError: "overloaded", PoolError: "failed"}


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

    def is_sound(self, spec: Spec, device: str) -> bool:
        """Return True if a spec has been simulated on a device, and was not refused."""
        trace = self.cache.get(_key(spec, (device,)))
        return trace is not None and trace[:1] != _REFUSED

    async def simulation(self, spec: Spec, devices: tuple[str, ...]) -> Simulation:
        """Return the simulation of a spec: cached, of a trace that another request waits for, or of a new one."""
        key = _key(spec, devices)
        trace = self.cache.get(key)
        self._metrics.cached.labels("traces", "miss" if trace is None else "hit").inc()
        if trace is None:
            under_way = self._under_way.get(key) or self._start_trace(key, spec, devices)
            with under_way.waiters:
                trace = await asyncio.shield(under_way.task)  # the trace continues while others wait for it
        if trace[:1] == _REFUSED:
            raise UserError(trace[1:].decode())
        simulation: Simulation = pickle.loads(trace[1:])  # noqa: S301 - from our own worker
        return simulation

    def _start_trace(self, key: bytes, spec: Spec, devices: tuple[str, ...]) -> _Trace:
        waiters = Waiters()
        task = asyncio.create_task(self._trace(key, spec, devices, waiters))
        self._under_way[key] = trace = _Trace(task, waiters)
        task.add_done_callback(lambda _: self._trace_ended(key, task))
        return trace

    def _trace_ended(self, key: bytes, task: "asyncio.Task[bytes]") -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()  # an abandoned trace has nobody to read it

    async def _trace(self, key: bytes, spec: Spec, devices: tuple[str, ...], waiters: Waiters) -> bytes:
        limits = self._limits
        question = tracing.TraceQuestion(spec, devices, limits.layers, limits.layer_passes)
        try:
            trace = _SIMULATED + await self.pool.run_pickled(partial(tracing.trace, question), waiters)
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


def _key(spec: Spec, devices: tuple[str, ...]) -> bytes:
    return content_key(spec.id.encode(), *(name.encode() for name in devices))
