"""Lines of a user's own code, among the frames that led somewhere."""

import sys
import traceback
from pathlib import Path

import vramcast

OURS = Path(vramcast.__file__).resolve().parent


def is_users(filename: str) -> bool:
    """Whether a file is neither this package's nor installed."""
    ours = Path(filename).is_relative_to(OURS) or filename.startswith("<frozen")
    return not ours and "site-packages" not in filename and Path(filename).is_file() and not (
        Path(filename).is_relative_to(sys.base_prefix)
    )  # fmt: skip


def place_of(error: BaseException) -> str | None:
    """The last line of the user's own on the way to an exception."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None


def place_now() -> str | None:
    """The last line of the user's own on the way to here."""
    here = traceback.walk_stack(None)
    return next((f"{item.f_code.co_filename}:{line}" for item, line in here if is_users(item.f_code.co_filename)), None)
