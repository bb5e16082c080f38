"""Bars of long work: drawn often where somebody looks on, seldom where a log would fill with them."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_WATCHED_SECONDS, _LOGGED_SECONDS = 0.1, 10.0


def bar(items: Iterable[Any] | None = None, **options: Any) -> "tqdm[Any]":
    """A bar over items, or one of a `total` that is moved by hand; the options are tqdm's."""
    often = _WATCHED_SECONDS if sys.stderr.isatty() else _LOGGED_SECONDS
    return tqdm(items, dynamic_ncols=True, mininterval=often, **options)
