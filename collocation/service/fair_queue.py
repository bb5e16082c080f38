"""A bounded queue and a limiter that serve their clients in turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")

CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")
"""The address of the client whose request is being answered; empty for work of the service itself."""


class FairQueue(Generic[T]):
    """Items by client. `pop` takes the clients in turn, so that one client cannot starve the others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[str, deque[T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, client: str, item: T) -> T | None:
        """Add an item, and return the item that has to give way if the queue is over its limit.

        That is the newest item of the client with the most items, which may be the new item itself.
        """
        self._items.setdefault(client, deque()).append(item)
        self._size += 1
        if self._size <= self._limit:
            return None
        longest = max(reversed(self._items), key=lambda name: len(self._items[name]))
        return self._take(longest, self._items[longest].pop)

    def pop(self) -> T:
        """Remove and return the oldest item of the client whose turn it is."""
        client = next(iter(self._items))
        item = self._take(client, self._items[client].popleft)
        if client in self._items:
            self._items.move_to_end(client)
        return item

    def remove_if(self, condition: Callable[[T], bool]) -> list[T]:
        """Remove and return all items that meet a condition."""
        removed: list[T] = []
        for client, items in list(self._items.items()):
            removed += [item for item in items if condition(item)]
            remaining = deque(item for item in items if not condition(item))
            self._size -= len(items) - len(remaining)
            if remaining:
                self._items[client] = remaining
            else:
                del self._items[client]
        return removed

    def _take(self, client: str, take: Callable[[], T]) -> T:
        item = take()
        self._size -= 1
        if not self._items[client]:
            del self._items[client]
        return item


class FairLimiter:
    """Lets a limited number of tasks in at a time; the others wait, and their clients take turns."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(1 << 30)  # bounded by requests in flight

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(CLIENT.get(), turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was this task's turn already
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        while len(self._waiting):
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
