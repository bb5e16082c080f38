"""What jobs were seen to take: so many of them in memory, and in a file where there is one."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from collocation.history import Observed
from collocation.service.batching import Batcher
from collocation.service.ledger import Ledger

Observation = tuple[bytes, Observed]

_LARGEST_BATCH = 1024
"""Observations that one sync takes to the disk."""

LOOKED_UP: ContextVar[dict[bytes, Observed | None]] = ContextVar("LOOKED_UP")
"""What the request under way was told of jobs: its answer is true as long as that is."""


class History:
    """Jobs by key, those that nobody asked for or saw longest first out. All but the file belongs to the event loop."""

    def __init__(self, path: Path | None, most_jobs: int) -> None:
        self._most_jobs = most_jobs
        self._ledger = Ledger(path, most_jobs) if path else None
        self._known = self._ledger.found if self._ledger else OrderedDict()
        self._writer: Batcher[Observation, None] = Batcher(self._stored, _LARGEST_BATCH)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes) -> Observed | None:
        """What is known of a job."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        LOOKED_UP.get({}).setdefault(key, found)  # a later one may know more than what was answered
        return found

    async def observe(self, key: bytes, peak_bytes: int) -> Observed:
        """Remember a run; what is known with it. It is on the disk first, so that memory never knows more."""
        seen = Observed(1, peak_bytes)
        if self._ledger:
            await self._writer.ask((key, seen))
        known = self._known[key] = seen.joined(self._known.pop(key, None))
        if len(self._known) > self._most_jobs:
            self._known.popitem(last=False)
        return known

    async def close(self) -> None:
        """Let another service have the file, once what is being written is."""
        await asyncio.to_thread(self._writer.close, wait=True)
        if self._ledger:
            self._ledger.close()

    def _stored(self, observations: Sequence[Observation]) -> Sequence[None]:
        if self._ledger:
            self._ledger.append(observations)
        return [None] * len(observations)
