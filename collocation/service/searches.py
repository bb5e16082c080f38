"""Searches that wait for one answer after another, in a thread: for the largest batch, and for advice."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.service.tracing import TracedJob
from vramcast.collocation.service.worker_pool import AbandonedError
from vramcast.errors import UserError
from vramcast.jobs.job import SpecJob
from vramcast.models.answer import Answer

R = TypeVar("R")
Ask = Callable[[TracedJob, str], Coroutine[Any, Any, Answer]]
"""Answers a job on a device, in the event loop."""
_SEARCHES = 4
"""Concurrent searches: each waits for traces, of which only a few run at a time."""


class JobVariants:
    """Answers for one job with some options changed, for a search in another thread than the event loop's."""

    def __init__(self, target: str, job: TracedJob, ask: Ask, seconds: float) -> None:
        self.target = target
        self.job = job
        self._ask = ask
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._cancelled = threading.Event()
        self._answering: Future[Answer] | None = None

    def answer(self, device: str, **changes: Any) -> Answer:
        """Return the answer for one device, with some training options changed."""
        return self._of(changed(self.job, **changes), device)

    def with_length(self, device: str, length: int) -> Answer:
        """Return the answer for sequences of another length."""
        if not isinstance(self.job, NamedJob):
            raise UserError("expected a network by its name beside a length, found a spec: change its network")
        return self._of(self.job.with_length(length), device)

    def cancel(self) -> None:
        """End the search at its next question."""
        self._cancelled.set()
        if self._answering is not None:
            self._answering.cancel()

    def _of(self, job: TracedJob, device: str) -> Answer:
        if self._cancelled.is_set():
            raise AbandonedError("expected a caller who waits, found none: call again")
        self._answering = asyncio.run_coroutine_threadsafe(self._ask(job, device), self._loop)
        return self._answering.result(self._seconds)


def changed(job: TracedJob, **changes: Any) -> TracedJob:
    """Return a job with some training options changed."""
    if isinstance(job, NamedJob):
        return job.with_options(**changes)
    return replace(job, training=SpecJob(job).setup(changes))


class Searches:
    """The threads of all searches."""

    def __init__(self, seconds: float) -> None:
        """Wait for an answer at most for some seconds."""
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(_SEARCHES, thread_name_prefix="search")
        self.running = 0

    async def run(self, search: Callable[[JobVariants], R], target: str, job: TracedJob, ask: Ask) -> R:
        """Return the result of a search, which ends early when its caller leaves."""
        variants = JobVariants(target, job, ask, self._seconds)
        context = contextvars.copy_context()
        self.running += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: context.run(search, variants))
        finally:
            self.running -= 1
            variants.cancel()

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
