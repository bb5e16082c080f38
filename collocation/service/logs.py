"""Logs as JSON lines: one event with its fields on each line."""

import json
import logging
import sys
import time
import traceback
from typing import Any, TextIO

_LONGEST = 500
LOGGER = logging.getLogger("vramcast.service")


class JsonLogFormatter(logging.Formatter):
    """Formats time, level, event, the fields in `extra={"fields": ...}`, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        entry: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send the service's events, and uvicorn's, to a stream; stderr by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    for name in ("vramcast.service", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == LOGGER.name else logging.WARNING)


def event(message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with its fields; long texts are cut, because clients could fill the disk with them."""
    cut = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in fields.items()}
    LOGGER.log(level, message, extra={"fields": cut})


_logged_places: set[tuple[str, str, int]] = set()
"""Places of errors whose traceback was logged: a client that causes an error often must not fill the disk."""


def failure(message: str, error: Exception) -> None:
    """Log an unexpected error, with its traceback the first time that it occurs at a place."""
    place = ("", "", 0)
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = (type(error).__name__, frame.f_code.co_filename, line)
    first = place not in _logged_places and len(_logged_places) < 1000
    if first:
        _logged_places.add(place)
    fields = {"error": type(error).__name__, "reason": str(error)[:_LONGEST]}
    LOGGER.error(message, exc_info=error if first else None, extra={"fields": fields})
