"""Questions that arrive while others are being answered make up the next batch: nobody waits for a timer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Answers in a thread of its own, so that the event loop goes on taking requests."""

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[A]], largest: int) -> None:
        self._answer = answer
        self._largest = largest
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self.batches = 0
        self.answered = 0

    async def ask(self, question: Q) -> A:
        """The answer to one question, worked out together with those of others."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[: self._largest], self._waiting[self._largest :]
            outcomes = await loop.run_in_executor(self._thread, self._outcomes, [item for item, _ in batch])
            self.batches += 1
            self.answered += len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():  # whoever asked was cancelled
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _outcomes(self, questions: list[Q]) -> Sequence[A | Exception]:
        """One bad question is not to spoil the answers to others."""
        try:
            return self._answer(questions)
        except Exception as error:
            if len(questions) == 1:
                return [error]
            return [outcome for question in questions for outcome in self._outcomes([question])]

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
