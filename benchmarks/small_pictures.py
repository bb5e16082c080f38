"""Pictures for the documentation, made small."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from vramcast.models.drawing import picture

_COLOURS = 128
"""Pictures of lines, dots and bars need no more, and are a third as large."""


@contextmanager
def light_picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is written to `path`, a PNG of few colours, when the block ends."""
    with picture(path, width, height) as figure:
        yield figure
    Image.open(path).convert("RGB").quantize(_COLOURS).save(path, optimize=True)
