"""Defaults that several commands share. The default device is in `devices`."""

import os
from pathlib import Path

CHECKPOINT = "universal"
"""The released estimator."""
RISK = 0.01
"""The probability that a safe figure is too low."""
BUCKET_MIB = 1024
"""The width of a bucket."""


def cache_directory() -> Path:
    """Return the user's cache of vramcast: VRAMCAST_CACHE, else the XDG cache directory."""
    if own := os.environ.get("VRAMCAST_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vramcast"
