"""Reads the bodies of requests within bounds of time, number and size, so that slow clients cannot block others."""

import asyncio
from collections import OrderedDict

from vramcast.collocation.service.response_cache import Receive
from vramcast.collocation.service.settings import Limits


class RequestRefusedError(Exception):
    """A request that is refused before the application sees it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class ClientLeftError(Exception):
    """The client closed the connection."""


class BodyReader:
    """The bodies that are being received. Beyond a limit, the oldest one is given up: fast clients are never it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size_bytes = 0
        self._reading: OrderedDict[object, asyncio.Timeout] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reading)

    async def read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Return the whole body."""
        limit, stated = self._limits.body_bytes, headers.get(b"content-length", b"0")
        if stated.isdigit() and (len(stated) > 18 or int(stated) > limit):
            raise RequestRefusedError(
                413, f"expected a body of at most {limit} bytes, found {stated[:20].decode()}: send less at once"
            )
        parts: list[bytes] = []
        token, size = object(), 0
        try:
            async with asyncio.timeout(self._limits.body_seconds) as deadline:
                self._reading[token] = deadline
                while True:
                    self._give_up_oldest()
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    part = message.get("body", b"")
                    parts.append(part)
                    size += len(part)
                    self._size_bytes += len(part)
                    if size > limit:
                        raise RequestRefusedError(
                            413, f"expected a body of at most {limit} bytes, found more: send less at once"
                        )
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestRefusedError(
                408, f"expected the body within {self._limits.body_seconds:g} s, found part of it: send it faster"
            ) from None
        finally:
            self._reading.pop(token, None)
            self._size_bytes -= size

    def _give_up_oldest(self) -> None:
        if len(self._reading) > self._limits.reading_bodies or self._size_bytes > self._limits.reading_bytes:
            _, deadline = self._reading.popitem(last=False)
            deadline.reschedule(asyncio.get_running_loop().time())
