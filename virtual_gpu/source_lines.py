"""Find the lines of a user's own code among the frames of a stack."""

import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType

import vramcast

OURS = Path(vramcast.__file__).resolve().parent


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return True for a file that is neither part of this package nor installed."""
    if filename.startswith("<") or "site-packages" in filename:
        return False
    path = Path(filename)
    return not path.is_relative_to(OURS) and path.is_file() and not path.is_relative_to(sys.base_prefix)


def place_of(error: BaseException) -> str | None:
    """Return the user's last line on the way to an exception, as 'file:line'."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None


def place_now() -> str | None:
    """Return the user's line that is running, as 'file:line'."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
