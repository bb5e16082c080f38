"""Calls of a storage from the event loop: in threads, with a time limit and a circuit breaker."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from vramcast.collocation.service.breaker import Breaker
from vramcast.collocation.service.database import StorageDownError
from vramcast.collocation.service.logs import event
from vramcast.collocation.service.storage import Storage

T = TypeVar("T")


class StorageAccess:
    """A storage, and whether it answers. After a failure or a timeout nothing is asked for some seconds."""

    def __init__(self, storage: Storage, breaker: Breaker | None = None) -> None:
        self.storage = storage
        self.breaker = breaker or Breaker()

    async def call(self, work: Callable[[], T], seconds: float) -> T:
        """Return the result of a call. Raise `StorageDownError` if there is none in time."""
        if self.storage.is_inline:
            return work()
        if self.breaker.is_open:
            raise StorageDownError("a database that did not answer a moment ago")
        try:
            async with asyncio.timeout(seconds):
                return await in_daemon_thread(work)
        except TimeoutError:
            down = StorageDownError(f"a database that does not answer for {seconds:g} s")
        except StorageDownError as error:
            down = error
        self.breaker.failed()
        event("history not reached", logging.WARNING, reason=down.detail)
        raise down


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Wait for a call. A thread of a pool would keep the process from ending if the call never returns."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():  # nobody waits for it
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="history", daemon=True).start()
    return await done
