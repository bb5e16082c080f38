"""Pictures for the documentation, made small."""

from pathlib import Path

from PIL import Image

_COLOURS = 128
"""Pictures of lines, dots and bars need no more, and are a third as large."""


def slim(path: Path) -> None:
    """Write a PNG again with few colours."""
    Image.open(path).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
