"""Tell whose code the frames of a stack belong to: the user's, vramcast's, or a library's."""

import re
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType

from vramcast import start

_PASSED_ON = re.compile(r"\b(original|real_\w+|func)\(")
_FILE_FUNCTIONS = "/file_protection/"
"""Functions of `os` that are redirected: their errors are the system's answer to the script."""
_HOMES = (Path(start.__file__).resolve().parent, Path(start.__file__).parent)


def is_ours(filename: str) -> bool:
    """Return True for a file of vramcast."""
    return any(Path(filename).is_relative_to(home) for home in _HOMES)


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return True for a file that is neither part of this package nor installed."""
    if filename.startswith("<") or "site-packages" in filename:
        return False
    path = Path(filename)
    return not is_ours(filename) and path.is_file() and not path.is_relative_to(sys.base_prefix)


def is_network_code(filename: str) -> bool:
    """Return True for a file that can hold code of a network: the user's, torch.nn, or a library other than torch."""
    if is_ours(filename) or "site-packages/" not in filename:
        return is_users(filename)
    library = filename.rpartition("site-packages/")[2]
    return not library.startswith("torch/") or library.startswith("torch/nn/")


def is_internal(error: BaseException) -> bool:
    """Return True for an exception that is a fault of vramcast, not of the network that it runs.

    Operators of a network reach torch through the tracer, so a frame of vramcast above the one that raised proves
    nothing. The fault is ours if our frame raised, or if no code of a network is on the stack.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return bool(files) and (is_ours(files[-1]) or not any(map(is_network_code, files)))


def is_fault_of_virtual_gpu(error: BaseException) -> bool:
    """Return True for an exception in a frame of vramcast that neither raised it on purpose nor passed a call on.

    Wrappers name the function of torch that they stand for `original`, `real_...` or `func`: what it raises is the
    answer to the script's own arguments.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):  # a signal, which meets any frame
        return False
    if not frames or not is_ours(frames[-1].filename):
        return False
    if _FILE_FUNCTIONS in frames[-1].filename and isinstance(error, (OSError, TypeError, ValueError)):
        return False
    line = frames[-1].line or ""
    return not line.startswith("raise") and _PASSED_ON.search(line) is None


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
