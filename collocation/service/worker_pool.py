"""Worker processes that run calls for the service: bounded in time and memory, and replaced when they die."""

import asyncio
import logging
import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vramcast.child.messages import REFUSED
from vramcast.child.process import Child, ChildEndedError, ChildError, ChildTimeoutError, module_command
from vramcast.collocation.service.logs import event
from vramcast.errors import UserError

R = TypeVar("R")

_START_SECONDS = 120.0
"""Importing torch on a busy machine."""
_POLL_SECONDS = 0.2
"""How often a pool checks that somebody still waits for a running call."""
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A simulation has no arithmetic to share between threads."""


class OverloadedError(Exception):
    """There are more calls than can be run soon."""


class LostError(UserError):
    """A worker did not return from a call: because of the call, or because the machine is busy."""


class AbandonedError(UserError):
    """The callers left before a call was finished."""


class PoolError(Exception):
    """No worker process can be started."""


class Waiters:
    """The number of requests that wait for a call: enter to wait, leave when answered or gone."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Waiters":
        self.count += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.count -= 1


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Bounds of a pool."""

    waiting: int
    """Calls in the queue; more are refused."""
    seconds: float
    """Run time of a call, after which its worker is killed."""
    abandoned_seconds: float
    """Run time of a call that nobody waits for any more. A short one ends well, and its result is kept."""
    worker_bytes: int
    """Memory of a worker process."""


@dataclass(eq=False)
class _Call:
    """A call, its result, and the requests that wait for it."""

    function: Callable[[], Any]
    waiters: Waiters
    result: "asyncio.Future[bytes]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def abandoned(self) -> bool:
        return self.waiters.count == 0


class WorkerPool:
    """Processes that each run one call at a time."""

    def __init__(self, workers: int, limits: PoolLimits, module: str) -> None:
        self._limits = limits
        self._queue: deque[_Call] = deque()
        self._idle = [_Worker(limits, module) for _ in range(workers)]
        self._all = list(self._idle)
        self._running: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """The number of calls that wait or run."""
        return len(self._queue) + len(self._running)

    async def start(self) -> None:
        """Start all processes; calls made before that wait."""
        workers, self._idle = self._idle, []
        await asyncio.gather(*(self._start(item) for item in workers))

    async def _start(self, one: "_Worker") -> None:
        try:
            await one.start()
        except PoolError as error:
            event("worker did not start", logging.ERROR, reason=str(error))
        finally:
            self._idle.append(one)
            self._dispatch()

    async def run(self, function: Callable[[], R], waiters: Waiters | None = None) -> R:
        """Return the result of a call in a worker. `UserError` says why there is none.

        Without `waiters`, the caller is the only one who waits.
        """
        result: R = pickle.loads(await self.run_pickled(function, waiters))  # noqa: S301 - from our own worker
        return result

    async def run_pickled(self, function: Callable[[], Any], waiters: Waiters | None = None) -> bytes:
        """Return the pickled result of a call, as the worker sent it."""
        with nullcontext(waiters) if waiters else Waiters() as counted:
            return await self._enqueued(_Call(function, counted)).result

    def _enqueued(self, call: _Call) -> _Call:
        for dropped in [item for item in self._queue if item.abandoned]:
            self._queue.remove(dropped)
            _fail(dropped, AbandonedError("expected a caller who waits, found none: call again"))
        if len(self._queue) >= self._limits.waiting:
            raise OverloadedError
        self._queue.append(call)
        self._dispatch()
        return call

    def _dispatch(self) -> None:
        """Give waiting calls to idle workers."""
        while self._idle and self._queue:
            call = self._queue.popleft()
            if call.abandoned:
                _fail(call, AbandonedError("expected a caller who waits, found none: call again"))
                continue
            task = asyncio.create_task(self._serve(self._idle.pop(), call))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _serve(self, one: "_Worker", call: _Call) -> None:
        try:
            result = await one.run(call)
        except Exception as error:
            _fail(call, error)
        else:
            if not call.result.done():
                call.result.set_result(result)
        finally:
            self._idle.append(one)
            self._dispatch()

    async def close(self) -> None:
        """End all processes."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*(item.end() for item in self._all))


def _fail(call: _Call, error: Exception) -> None:
    if not call.result.done():
        call.result.set_exception(error)
        call.result.exception()  # an abandoned call has nobody to read it


class _Worker:
    """One process, started when it is needed."""

    def __init__(self, limits: PoolLimits, module: str) -> None:
        self._limits = limits
        self._module = module
        self._child: Child | None = None

    async def start(self) -> Child:
        if self._child is not None and not self._child.has_ended():
            return self._child
        await self.end()
        command = module_command("vramcast.collocation.service.worker", str(self._limits.worker_bytes), self._module)
        self._child = child = Child(command, _environment(os.environ), math.inf)
        try:
            await _message(child, lambda: _START_SECONDS)
        except ChildError as error:
            await self.end()
            raise PoolError(f"a worker process did not start: {error}") from error
        except asyncio.CancelledError:
            await self.end()
            raise
        return child

    async def run(self, call: _Call) -> bytes:
        child = await self.start()
        try:
            child.send({"do": "call"}, pickle.dumps(call.function))
            # for as long as somebody waits for it and it is in time
            answer = await _message(
                child, lambda: self._limits.abandoned_seconds if call.abandoned else self._limits.seconds
            )
        except ChildTimeoutError:
            await self.end()
            if call.abandoned:
                event("abandoned call ended", logging.INFO)
                raise AbandonedError("expected a caller who waits, found none: call again") from None
            event("call timed out", logging.WARNING, seconds=self._limits.seconds)
            raise LostError(
                f"expected a job that takes at most {self._limits.seconds:g} s, found a slower one: make it smaller"
            ) from None
        except ChildEndedError:
            code = await self.end()
            event("worker died", logging.WARNING, exit_code=code)
            raise LostError(
                "expected a job that can be simulated, found that its worker died: make it smaller"
            ) from None
        except asyncio.CancelledError:
            await self.end()
            raise
        if answer["event"] == REFUSED:
            raise pickle.loads(answer["payload"])  # noqa: S301 - from our own worker
        payload: bytes = answer["payload"]
        return payload

    async def end(self) -> int | None:
        if self._child is None:
            return None
        child, self._child = self._child, None
        child.kill()
        await asyncio.to_thread(child.end_now)
        return child.exit_code


async def _message(child: Child, limit_seconds: Callable[[], float]) -> dict[str, Any]:
    """Return the next message of a child; raise `ChildError` if there is none in time.

    The limit is asked again while the child works, because it may change meanwhile.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    start = loop.time()
    loop.add_reader(child.fileno(), ready.set)
    try:
        while True:
            ended = child.has_ended()  # looked at before its last messages are read
            ready.clear()
            for message in child.messages():
                return message
            if ended or child.is_silent:
                raise ChildEndedError(child.ending)
            left_seconds = start + limit_seconds() - loop.time()
            if left_seconds <= 0:
                raise ChildTimeoutError(child.ending)
            with suppress(TimeoutError):
                await asyncio.wait_for(ready.wait(), min(left_seconds, _POLL_SECONDS))
    finally:
        loop.remove_reader(child.fileno())


def _environment(outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker, without the token, which it does not need."""
    return {**{name: value for name, value in outer.items() if name != "VRAMCAST_TOKEN"}, **_SINGLE_THREADED}
