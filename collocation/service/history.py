"""The history: observed peaks of jobs in memory, and in a file if there is one."""

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
from vramcast.collocation.service.history_file import HistoryFile, JobPeak, NotStoredError
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.settings import Limits

_LARGEST_BATCH = 1024
"""Observations that are written with one sync."""

LOOKED_UP: ContextVar[dict[bytes, ObservedPeak | None]] = ContextVar("LOOKED_UP")
"""The history of jobs that the current request looked up: its response is valid as long as that does not change."""


@dataclass(frozen=True)
class _Change:
    """A change of the history that a request waits for."""

    key: bytes
    peak_bytes: int | None
    """None to forget the job."""
    stored: "asyncio.Future[ObservedPeak | None]"


class History:
    """Observed peaks by job; the least recently used are dropped first. Only the file is used in another thread.

    Memory changes if and only if the change is on the disk, also if its client has given up.
    """

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self._limits = limits
        self._file = HistoryFile(path, limits.history_jobs) if path else None
        self._peaks = self._file.peaks if self._file else OrderedDict()
        self._waiting: list[_Change] = []
        self._writing: asyncio.Task[None] | None = None
        self._overdue_at: float | None = None
        """The time at which the current write will have taken too long."""

    def __len__(self) -> int:
        return len(self._peaks)

    def get(self, key: bytes) -> ObservedPeak | None:
        """Return the observed peak of a job."""
        peak = self._peaks.get(key)
        if peak is not None:
            self._peaks.move_to_end(key)
        LOOKED_UP.get({}).setdefault(key, peak)  # a later lookup may find more than the response says
        return peak

    async def observe(self, key: bytes, peak_bytes: int) -> ObservedPeak:
        """Add a run, and return the observed peak with it."""
        peak = await self._change(key, peak_bytes)
        if peak is None:
            raise TypeError("an observed job has a peak")
        return peak

    async def forget(self, key: bytes) -> None:
        """Remove all runs of a job."""
        await self._change(key, None)

    async def close(self) -> None:
        """Release the file after the current write, but do not wait long for a silent disk."""
        if self._file is None:
            return
        try:
            async with asyncio.timeout(min(self._limits.store_seconds, self._limits.shutdown_seconds)):
                if self._writing:
                    await asyncio.shield(self._writing)
                await _in_daemon_thread(self._file.close)
        except TimeoutError:
            event("history not closed", logging.ERROR, reason="the disk does not answer")

    async def _change(self, key: bytes, peak_bytes: int | None) -> ObservedPeak | None:
        loop = asyncio.get_running_loop()
        change = _Change(key, peak_bytes, loop.create_future())
        if self._file is None:
            ((_, peak),) = self._after([change])
            self._put(key, peak)
            return peak
        if self._overdue_at is not None and loop.time() > self._overdue_at:
            raise NotStoredError("a disk that is still writing an earlier one")
        self._waiting.append(change)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(self._file))
        try:
            async with asyncio.timeout(self._limits.store_seconds):
                return await change.stored
        except TimeoutError:
            raise NotStoredError(f"a disk that does not answer for {self._limits.store_seconds:g} s") from None

    async def _write(self, file: HistoryFile) -> None:
        """Write the waiting changes; those that arrive meanwhile are the next batch."""
        while self._waiting:
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
            batch = [change for change in batch if not change.stored.done()]  # the clients of the others have given up
            if not batch:
                continue
            after = self._after(batch)
            try:
                await self._on_disk(file.append, after)
            except Exception as error:  # the clients that wait must learn of it
                for change in batch:
                    if not change.stored.done():
                        change.stored.set_exception(error)
                continue
            for change, (key, peak) in zip(batch, after, strict=True):
                self._put(key, peak)
                if not change.stored.done():
                    change.stored.set_result(peak)
            if file.is_long:
                await self._on_disk(file.shorten, list(self._peaks.items()))

    async def _on_disk(self, call: Callable[[Any], None], argument: Any) -> None:
        self._overdue_at = asyncio.get_running_loop().time() + self._limits.store_seconds
        try:
            await _in_daemon_thread(lambda: call(argument))
        finally:
            self._overdue_at = None

    def _after(self, batch: Sequence[_Change]) -> list[JobPeak]:
        """Return the observed peak of a job after each change."""
        after: list[JobPeak] = []
        changed: dict[bytes, ObservedPeak | None] = {}
        for change in batch:
            before = changed[change.key] if change.key in changed else self._peaks.get(change.key)
            peak = None if change.peak_bytes is None else ObservedPeak(1, change.peak_bytes).joined(before)
            changed[change.key] = peak
            after.append((change.key, peak))
        return after

    def _put(self, key: bytes, peak: ObservedPeak | None) -> None:
        self._peaks.pop(key, None)
        if peak:
            self._peaks[key] = peak
        if len(self._peaks) > self._limits.history_jobs:
            self._peaks.popitem(last=False)


async def _in_daemon_thread(call: Callable[[], None]) -> None:
    """Wait for a call. A thread of a pool would keep the process from ending if the call never returns."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():  # nobody waits for it
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def work() -> None:
        error = None
        try:
            call()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, name="history", daemon=True).start()
    await done
