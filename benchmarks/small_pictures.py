"""Small PNG pictures for the documentation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from vramcast.models.drawing import picture

_COLOURS = 128
"""Enough for lines, dots and bars, and a third of the file size."""


@contextmanager
def light_picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure, and write it to `path` as a PNG with few colours when the block ends."""
    with picture(path, width, height) as figure:
        yield figure
    Image.open(path).convert("RGB").quantize(_COLOURS).save(path, optimize=True)
