"""The history: observed peaks of jobs, cached in front of a database."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.database import StorageDownError, is_url
from vramcast.collocation.service.listener import Listener
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.settings import Limits
from vramcast.collocation.service.storage import Change, Changed, Storage
from vramcast.collocation.service.storage_access import StorageAccess, in_daemon_thread

T = TypeVar("T")

_LARGEST_BATCH = 1024
"""Observations that are written with one sync."""
_DRAIN_SECONDS = 1.0
"""Between two attempts to move waiting changes to the database."""


class NotStoredError(Exception):
    """An observation that may not be on the disk."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"expected to store the observation, found: {reason}; check the disk, and send it again")


@dataclass
class Lookups:
    """The history as a request found it: its response is valid as long as that does not change."""

    peaks: dict[bytes, ObservedPeak | None] = field(default_factory=dict)
    unavailable: bool = False
    """True if the database did not answer."""


LOOKUPS: ContextVar[Lookups] = ContextVar("LOOKUPS")


@dataclass(frozen=True)
class _Request:
    """A change of the history that a request waits for."""

    change: Change
    stored: "asyncio.Future[ObservedPeak | None]"


class History:
    """Observed peaks by job. A change is acknowledged once it is on a disk: the database's, or that of the queue.

    A database that replicas share may be down. Jobs then have no history, and changes wait in a file, in order.
    """

    def __init__(self, place: str | Path | None, limits: Limits, queue: Path | None = None) -> None:
        self._limits = limits
        self._shared = isinstance(place, str) and is_url(place)
        self.storage = Storage(place if self._shared or place is None else Path(place), limits.history_jobs)
        self.access = StorageAccess(self.storage)
        self._queue = Storage(queue, limits.history_jobs, "--history-queue") if queue and self._shared else None
        self._queued = self._queue.count_waiting() if self._queue else 0
        self._cache: OrderedDict[bytes, ObservedPeak | None] = OrderedDict()
        self._is_cache_sound = not self._shared
        """True if the changes of other replicas are announced."""
        self._reading: dict[bytes, object] = {}
        self._waiting: list[_Request] = []
        self._writing: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._overdue_at: float | None = None
        """The time at which the current write will have taken too long."""

    def __len__(self) -> int:
        return self.storage.jobs + self._queued

    @property
    def waiting(self) -> int:
        """The number of changes that wait for the database."""
        return self._queued

    async def start(self) -> None:
        """Listen to other replicas, and move waiting changes to the database from now on."""
        if not self._shared:
            return
        loop = asyncio.get_running_loop()

        def in_loop(call: Callable[..., None], *arguments: object) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(call, *arguments)

        self._listener = Listener(
            self.storage.engine,
            lambda connected: in_loop(self._connected, connected),
            lambda keys: in_loop(self._changed, keys),
        )
        self._draining = asyncio.create_task(self._drain())
        with suppress(StorageDownError):  # it may come up later
            await self.access.call(self.storage.prepare, self._limits.store_seconds)

    async def get(self, key: bytes) -> ObservedPeak | None:
        """Return the observed peak of a job; None if there is none, or no database that answers."""
        lookups = LOOKUPS.get(None)
        if self._is_cache_sound and key in self._cache:
            peak = self._cache[key]
            self._cache.move_to_end(key)
        else:
            try:
                peak = await self._read(key)
            except StorageDownError:
                if lookups:
                    lookups.unavailable = True
                return None
        if lookups:
            lookups.peaks.setdefault(key, peak)  # a later lookup may find more than the response says
        return peak

    async def observe(self, key: bytes, peak_bytes: int) -> ObservedPeak:
        """Add a run, and return the observed peak with it; of this run alone, if it waits for the database."""
        peak = await self._change(Change(key, peak_bytes))
        if peak is None:
            raise TypeError("an observed job has a peak")
        return peak

    async def forget(self, key: bytes) -> None:
        """Remove all runs of a job."""
        await self._change(Change(key, None))

    async def close(self) -> None:
        """Close the database after the current write, but do not wait long for a silent disk."""
        if self._listener:
            self._listener.close()
        if self._draining:
            self._draining.cancel()
        try:
            async with asyncio.timeout(min(self._limits.store_seconds, self._limits.shutdown_seconds)):
                if self._writing:
                    await asyncio.shield(self._writing)
                await in_daemon_thread(self._close)
        except TimeoutError:
            event("history not closed", logging.ERROR, reason="the disk does not answer")

    def _close(self) -> None:
        self.storage.close()
        if self._queue:
            self._queue.close()

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _read(self, key: bytes) -> ObservedPeak | None:
        mark = self._reading[key] = object()
        try:
            peaks = await self.access.call(lambda: self.storage.peaks([key]), self._limits.look_up_seconds)
            if self._reading.get(key) is mark:  # it did not change while it was read
                self._put(key, peaks.get(key))
        finally:
            if self._reading.get(key) is mark:
                del self._reading[key]
        return peaks.get(key)

    def _put(self, key: bytes, peak: ObservedPeak | None) -> None:
        self._reading.pop(key, None)
        self._cache[key] = peak
        self._cache.move_to_end(key)
        if len(self._cache) > self._limits.cached_history_jobs:
            self._cache.popitem(last=False)

    def _changed(self, keys: Sequence[bytes]) -> None:
        """Drop the cached peaks of jobs that a replica changed."""
        for key in keys:
            self._reading.pop(key, None)
            self._cache.pop(key, None)

    def _connected(self, connected: bool) -> None:
        self._is_cache_sound = connected
        self._cache.clear()
        self._reading.clear()

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _change(self, change: Change) -> ObservedPeak | None:
        if self.storage.is_inline:
            (peak,) = self._cached([change], self.storage.change([change]))
            return peak
        loop = asyncio.get_running_loop()
        if self._overdue_at is not None and loop.time() > self._overdue_at:
            raise NotStoredError("a disk that is still writing an earlier one")
        request = _Request(change, loop.create_future())
        self._waiting.append(request)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        try:
            async with asyncio.timeout(self._limits.store_seconds):
                peak = await request.stored
        except TimeoutError:
            raise NotStoredError(f"a disk that does not answer for {self._limits.store_seconds:g} s") from None
        if self._queued and (lookups := LOOKUPS.get(None)):
            lookups.unavailable = True
        return peak

    async def _write(self) -> None:
        """Write the waiting changes; those that arrive meanwhile are the next batch."""
        while self._waiting:
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
            batch = [item for item in batch if not item.stored.done()]  # the clients of the others have given up
            if not batch:
                continue
            try:
                after = await self._stored([item.change for item in batch])
            except Exception as error:  # the clients that wait must learn of it
                event("observation not stored", logging.ERROR, reason=str(error))
                for item in batch:
                    if not item.stored.done():
                        item.stored.set_exception(error)
                continue
            for item, peak in zip(batch, after, strict=True):
                if not item.stored.done():
                    item.stored.set_result(peak)

    async def _stored(self, changes: Sequence[Change]) -> list[ObservedPeak | None]:
        """Return the observed peak after each change, once all are on a disk."""
        if self._queue is None:
            try:
                return self._cached(changes, await self._on_disk(lambda: self.storage.change(changes)))
            except StorageDownError as error:
                raise NotStoredError(str(error)) from error
        if self._queued:
            return await self._put_aside(self._queue, changes)  # behind earlier ones: a peak may be forgotten after it
        try:
            seconds = self._limits.store_seconds / 2  # then there is time for the queue
            return self._cached(changes, await self.access.call(lambda: self.storage.change(changes), seconds))
        except StorageDownError:
            return await self._put_aside(self._queue, changes)

    def _cached(self, changes: Sequence[Change], changed: Changed) -> list[ObservedPeak | None]:
        """Update the cache, and return the observed peak after each change."""
        self._changed(changed.dropped)
        for change, peak in zip(changes, changed.after, strict=True):
            if self._shared:
                self._changed([change.key])  # a replica may have changed it since
            else:
                self._put(change.key, peak)
        return changed.after

    async def _put_aside(self, queue: Storage, changes: Sequence[Change]) -> list[ObservedPeak | None]:
        if self._queued + len(changes) > self._limits.waiting_observations:
            raise NotStoredError("a database that does not answer, and too many that wait for it")
        try:
            await self._on_disk(lambda: queue.wait(changes))
        except StorageDownError as error:
            raise NotStoredError(str(error)) from error
        self._queued += len(changes)
        return [None if item.peak_bytes is None else ObservedPeak(1, item.peak_bytes) for item in changes]

    async def _on_disk(self, call: Callable[[], T]) -> T:
        self._overdue_at = asyncio.get_running_loop().time() + self._limits.store_seconds
        try:
            return await in_daemon_thread(call)
        finally:
            self._overdue_at = None

    async def _drain(self) -> None:
        while self._queue:
            await asyncio.sleep(_DRAIN_SECONDS)
            with suppress(StorageDownError):
                while self._queued:
                    await self._bring(self._queue)

    async def _bring(self, queue: Storage) -> None:
        """Move waiting changes to the database. After a crash between the two some arrive twice, but all arrive."""
        last, changes = await in_daemon_thread(lambda: queue.waiting(_LARGEST_BATCH))
        await self.access.call(lambda: self.storage.change(changes), self._limits.store_seconds)
        await in_daemon_thread(lambda: queue.end_waiting(last))
        self._queued -= len(changes)
        self._changed([item.key for item in changes])
