"""What jobs were seen to take: so many of them in memory, and in a file where there is one."""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.history_file import Change, HistoryFile, NotStoredError
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.settings import Limits

_LARGEST_BATCH = 1024
"""Observations that one sync takes to the disk."""

LOOKED_UP: ContextVar[dict[bytes, ObservedPeak | None]] = ContextVar("LOOKED_UP")
"""What the request under way was told of jobs: its answer is true as long as that is."""


@dataclass(frozen=True)
class _Told:
    """What somebody told of a job, and waits to see stored."""

    key: bytes
    peak_bytes: int | None
    """None where what is known of the job is to be forgotten."""
    stored: "asyncio.Future[ObservedPeak | None]"


class History:
    """Jobs by key, those that nobody asked for or saw longest first out. All but the file belongs to the event loop.

    Memory changes when, and only when, the change is on the disk: also where whoever told of it has given up.
    """

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self._limits = limits
        self._ledger = HistoryFile(path, limits.history_jobs) if path else None
        self._known = self._ledger.found if self._ledger else OrderedDict()
        self._waiting: list[_Told] = []
        self._writing: asyncio.Task[None] | None = None
        self._overdue_at: float | None = None
        """When what is being written will have taken too long."""

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes) -> ObservedPeak | None:
        """What is known of a job."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        LOOKED_UP.get({}).setdefault(key, found)  # a later one may know more than what was answered
        return found

    async def observe(self, key: bytes, peak_bytes: int) -> ObservedPeak:
        """Remember a run; what is known with it."""
        known = await self._change(key, peak_bytes)
        if known is None:
            raise TypeError("what was told of is known")
        return known

    async def forget(self, key: bytes) -> None:
        """Forget all runs of a job."""
        await self._change(key, None)

    async def close(self) -> None:
        """Let another service have the file, once what is being written is; a silent disk is not waited for long."""
        if self._ledger is None:
            return
        try:
            async with asyncio.timeout(min(self._limits.store_seconds, self._limits.shutdown_seconds)):
                if self._writing:
                    await asyncio.shield(self._writing)
                await _in_daemon_thread(self._ledger.close)
        except TimeoutError:
            event("history not closed", logging.ERROR, reason="the disk says nothing")

    async def _change(self, key: bytes, peak_bytes: int | None) -> ObservedPeak | None:
        loop = asyncio.get_running_loop()
        told = _Told(key, peak_bytes, loop.create_future())
        if self._ledger is None:
            ((_, known),) = self._after([told])
            self._put(key, known)
            return known
        if self._overdue_at is not None and loop.time() > self._overdue_at:
            raise NotStoredError("a disk that still has an earlier one to write")
        self._waiting.append(told)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(self._ledger))
        try:
            async with asyncio.timeout(self._limits.store_seconds):
                return await told.stored
        except TimeoutError:
            raise NotStoredError(f"a disk that says nothing for {self._limits.store_seconds:g} s") from None

    async def _write(self, ledger: HistoryFile) -> None:
        """Store what waits; what arrives meanwhile is the next batch."""
        while self._waiting:
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
            batch = [told for told in batch if not told.stored.done()]  # others have given up
            if not batch:
                continue
            after = self._after(batch)
            try:
                await self._on_disk(ledger.append, after)
            except Exception as error:  # whatever it is, those who wait are to know
                for told in batch:
                    if not told.stored.done():
                        told.stored.set_exception(error)
                continue
            for told, change in zip(batch, after, strict=True):
                self._put(*change)
                if not told.stored.done():
                    told.stored.set_result(change[1])
            if ledger.is_long:
                await self._on_disk(ledger.shorten, list(self._known.items()))

    async def _on_disk(self, call: Callable[[Any], None], argument: Any) -> None:
        self._overdue_at = asyncio.get_running_loop().time() + self._limits.store_seconds
        try:
            await _in_daemon_thread(lambda: call(argument))
        finally:
            self._overdue_at = None

    def _after(self, batch: Sequence[_Told]) -> list[Change]:
        """What is known of a job after each of them."""
        after: list[Change] = []
        changed: dict[bytes, ObservedPeak | None] = {}
        for told in batch:
            before = changed[told.key] if told.key in changed else self._known.get(told.key)
            known = None if told.peak_bytes is None else ObservedPeak(1, told.peak_bytes).joined(before)
            changed[told.key] = known
            after.append((told.key, known))
        return after

    def _put(self, key: bytes, known: ObservedPeak | None) -> None:
        self._known.pop(key, None)
        if known:
            self._known[key] = known
        if len(self._known) > self._limits.history_jobs:
            self._known.popitem(last=False)


async def _in_daemon_thread(call: Callable[[], None]) -> None:
    """Wait for a call; a thread of a pool would keep the process from ending where the call never does."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def work() -> None:
        error = None
        try:
            call()
        except Exception as found:
            error = found
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, name="history", daemon=True).start()
    await done
