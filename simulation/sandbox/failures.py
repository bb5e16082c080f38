"""Exceptions of a child: as messages with the user's frames, and as exceptions of the parent again.

The user's code is never blamed for a frame of ours: such an exception is internal.
"""

import re
import traceback
from collections.abc import Mapping
from typing import Any

from vramcast.child.messages import FAILED, INTERNAL, REFUSED
from vramcast.error_words import kind_of, message_of, shortened, text_of, traceback_of
from vramcast.errors import UserError
from vramcast.virtual_gpu.tracing.source_lines import is_internal, is_users, place_of


class NetworkError(Exception):
    """An exception of the network's own code, with the user's line."""

    def __init__(self, summary: str, place: str | None, traceback: str) -> None:
        super().__init__(f"{summary} (at {place})" if place else summary)
        self.traceback = traceback


class InternalError(NetworkError):
    """An exception of vramcast itself in the child process."""


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return the message for an exception that a request raised."""
    if isinstance(error, UserError):
        place = place_of(error)
        return {"event": REFUSED, "reason": shortened(f"{error} (at {place})" if place else str(error))}
    if is_internal(error):
        return internal_failure(error)
    return _failure(FAILED, error, users_traceback(error))


def internal_failure(error: BaseException) -> dict[str, Any]:
    """Return the message for a fault of vramcast, with all frames."""
    return _failure(INTERNAL, error, traceback_of(error, traceback.extract_tb(error.__traceback__)))


def _failure(event: str, error: BaseException, trace: str) -> dict[str, Any]:
    summary = shortened(summary_of(error) + "".join(f", {note}" for note in _notes(error)))
    place = place_of(error)
    return {"event": event, "summary": _users_names(summary), "place": place, "traceback": _users_names(trace)}


def _notes(error: BaseException) -> list[str]:
    try:
        return list(map(text_of, getattr(error, "__notes__", ())))
    except BaseException:  # the class of the exception may be the user's
        return []


def summary_of(error: BaseException) -> str:
    """Return an exception on one line."""
    return f"{kind_of(error)}: {message_of(error)}"


def users_traceback(error: BaseException) -> str:
    """Return the traceback with the user's own lines and the last one."""
    frames = list(traceback.extract_tb(error.__traceback__))
    return traceback_of(error, [frame for frame in frames[:-1] if is_users(frame.filename)] + frames[-1:])


def raise_failure(message: Mapping[str, Any]) -> None:
    """Raise the exception that a message stands for, if it does."""
    if message["event"] == REFUSED:
        raise UserError(str(message["reason"]))
    if message["event"] in (FAILED, INTERNAL):
        kind = InternalError if message["event"] == INTERNAL else NetworkError
        raise kind(str(message["summary"]), message["place"], str(message["traceback"]))


def _users_names(text: str) -> str:
    """Name layers as in the user's network, without our wrappers."""
    return re.sub(r"(?:, |\s)in the layer 'subject'", "", re.sub(r"'(?:subject\.)+", "'", text))
