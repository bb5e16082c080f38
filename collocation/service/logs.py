"""Logs as JSON lines: one event a line, its fields beside it."""

import json
import logging
import sys
import time
from typing import Any, TextIO

_LONGEST = 500
LOGGER = logging.getLogger("vramcast.service")


class JsonLogFormatter(logging.Formatter):
    """Time, level, event, the fields that were given as `extra={"fields": ...}`, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
    """Log an event with its fields; texts of others are cut, lest they fill the disk."""
    cut = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in fields.items()}
    LOGGER.log(level, message, extra={"fields": cut})
