"""Worker processes that trace networks: bounded in time and memory, and replaced when they die."""

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vramcast.collocation.service import worker
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.settings import Limits
from vramcast.errors import UserError

_START_SECONDS = 120.0
"""Importing torch on a busy machine."""
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A trace has no arithmetic to share out."""


class OverloadedError(Exception):
    """More is asked than can be answered soon."""


class LostError(UserError):
    """A network that a worker did not come back from: perhaps its own fault, perhaps that of a busy machine."""


class PoolError(Exception):
    """No worker process can be started."""


class TracePool:
    """So many processes, each with one network at a time."""

    def __init__(self, workers: int, limits: Limits, module: str = worker.__name__) -> None:
        self._limits = limits
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all = [_Worker(limits, module) for _ in range(workers)]
        self.waiting = 0

    async def start(self) -> None:
        """Have all processes ready; whoever asks before that waits."""
        await asyncio.gather(*(self._start(item) for item in self._all))

    async def _start(self, one: "_Worker") -> None:
        try:
            await one.start()
        except PoolError as error:
            event("worker did not start", logging.ERROR, reason=str(error))
        finally:
            self._idle.put_nowait(one)

    async def trace(self, question: Any) -> bytes:
        """What a worker found, pickled; a sentence (`UserError`) where there is nothing to be found."""
        if self.waiting >= self._limits.waiting_traces:
            raise OverloadedError
        self.waiting += 1
        try:
            one = await self._idle.get()
            try:
                return await one.ask(question)
            finally:
                self._idle.put_nowait(one)
        finally:
            self.waiting -= 1

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(item.end() for item in self._all))


class _Worker:
    """One process, started when it is needed."""

    def __init__(self, limits: Limits, module: str) -> None:
        self._limits = limits
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            str(self._limits.worker_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(os.environ),
            start_new_session=True,  # a Ctrl-C is the service's to handle
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _read(process)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await self.end()
            raise PoolError(f"a worker process did not start: {error!r}") from error
        return process

    async def ask(self, question: Any) -> bytes:
        process = await self.start()
        try:
            async with asyncio.timeout(self._limits.trace_seconds):
                data = pickle.dumps(question)
                process.stdin.write(worker.HEADER.pack(len(data)) + data)  # type: ignore[union-attr]
                kind, found = pickle.loads(await _read(process))  # noqa: S301 - from our own worker
        except TimeoutError:
            await self.end()
            event("trace timed out", logging.WARNING, seconds=self._limits.trace_seconds)
            raise LostError(
                f"expected a network that is traced within {self._limits.trace_seconds:g} s, found a slower one: "
                "make it smaller"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.end()
            event("worker died", logging.WARNING, exit_code=code)
            raise LostError("expected a network that can be traced, found that the worker died of it") from None
        if kind == worker.REFUSED:
            raise UserError(found)
        return bytes(found)

    async def end(self) -> int | None:
        if self._process is None:
            return None
        with suppress(ProcessLookupError):
            self._process.kill()
        code = await self._process.wait()
        self._process = None
        return code


async def _read(process: asyncio.subprocess.Process) -> bytes:
    stream = process.stdout
    if stream is None:
        raise TypeError("the worker's output is a pipe")
    (length,) = worker.HEADER.unpack(await stream.readexactly(worker.HEADER.size))
    return await stream.readexactly(length)


def _environment(outer: Mapping[str, str]) -> dict[str, str]:
    return {**outer, **_SINGLE_THREADED}
