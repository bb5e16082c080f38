"""The words of an exception that foreign code raised: short enough for a pipe, and never a second exception."""

import traceback
from collections.abc import Iterable

LONGEST_MESSAGE, LONGEST_TRACEBACK = 4_000, 20_000  # characters
_NO_MESSAGE = "(its message cannot be printed)"


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return the beginning and the end of a long text."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def kind_of(error: BaseException) -> str:
    """Return the name of the class of an exception, even where that has a metaclass of the user's."""
    return str(type.__getattribute__(type(error), "__name__"))


def text_of(value: object) -> str:
    """Return `str(value)`, shortened, even where the class of the value cannot print it."""
    try:
        return shortened(str(value))
    except BaseException:  # an exception of the user's may raise anything where it is printed
        return _NO_MESSAGE


def message_of(error: BaseException) -> str:
    """Return the message of an exception on one line."""
    return " ".join(text_of(error).split())


def traceback_of(error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    """Return a traceback with these frames, as Python prints it."""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(list(frames))]
    try:
        ending = "".join(traceback.format_exception_only(error)).strip()
    except BaseException:  # see text_of
        ending = f"{kind_of(error)}: {_NO_MESSAGE}"
    return shortened("".join(lines), LONGEST_TRACEBACK) + shortened(ending)
