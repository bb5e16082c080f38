"""Reads the bodies of requests within bounds of time, number and size. A proxy in front keeps slow clients away."""

import asyncio

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
    """The bodies that are being received. Beyond a limit, further ones are refused."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size_bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Return the whole body."""
        limit, stated = self._limits.body_bytes, headers.get(b"content-length", b"0")
        if stated.isdigit() and (len(stated) > 18 or int(stated) > limit):
            raise RequestRefusedError(
                413, f"expected a body of at most {limit} bytes, found {stated[:20].decode()}: send less at once"
            )
        parts: list[bytes] = []
        size = 0
        self._count += 1
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    self._check_room()
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
            self._count -= 1
            self._size_bytes -= size

    def _check_room(self) -> None:
        if self._count > self._limits.reading_bodies or self._size_bytes > self._limits.reading_bytes:
            raise RequestRefusedError(503, "expected fewer bodies at once, found more: come back soon")
