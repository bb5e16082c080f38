"""Requests that arrive while the estimator is busy form the next batch; there is no timer."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")


class Batcher(Generic[Q, A]):
    """Answers batches of questions in one thread, so that the event loop competes with one thread alone."""

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Sequence[A]],
        largest: int,
        weight: Callable[[Q], int] = lambda _: 1,
        heaviest: int | None = None,
    ) -> None:
        """Make batches of at most `largest` questions, whose weights add up to at most `heaviest`."""
        self._answer = answer
        self._largest = largest
        self._weight = weight
        self._heaviest = heaviest or largest
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()  # bounded by requests in flight
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self.batches = 0
        self.answered = 0

    async def ask(self, question: Q) -> A:
        """Return the answer to a question, which shares a batch with others."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run other work of a request in the same thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next():
            outcomes = await loop.run_in_executor(self._thread, self._outcomes, [item for item, _ in batch])
            self.batches += 1
            self.answered += len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():  # the caller was cancelled
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _next(self) -> list[tuple[Q, "asyncio.Future[A]"]]:
        """Take the next batch from the queue; questions whose callers left are dropped."""
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        weight = 0
        while self._waiting and len(batch) < self._largest and weight < self._heaviest:
            question, future = self._waiting.popleft()
            if not future.done():
                batch.append((question, future))
                weight += self._weight(question)
        return batch

    def _outcomes(self, questions: list[Q]) -> Sequence[A | Exception]:
        """Answer a batch. If that fails, answer its questions one by one, so that only the bad ones fail."""
        try:
            return self._answer(questions)
        except Exception as error:
            if len(questions) == 1:
                return [error]
            return [outcome for question in questions for outcome in self._outcomes([question])]

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
