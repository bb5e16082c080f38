"""Progress bars: updated often on a terminal and rarely in a log."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_TERMINAL_SECONDS, _LOG_SECONDS = 0.1, 10.0


def bar(items: Iterable[Any] | None = None, **options: Any) -> "tqdm[Any]":
    """Return a tqdm bar over items, or over a `total` that the caller updates."""
    seconds = _TERMINAL_SECONDS if sys.stderr.isatty() else _LOG_SECONDS
    return tqdm(items, dynamic_ncols=True, mininterval=seconds, **options)
