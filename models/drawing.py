"""Figures without a screen. Imports matplotlib, so it is imported only where something is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DOTS_PER_INCH = 150
_UNNAMED = {".svg": {"Date": None, "Creator": None}}
"""Files without a date and a version, so that equal tables give equal bytes."""


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure and write it to `path` when the block ends. Does not use pyplot, whose state is global."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=_UNNAMED.get(path.suffix.lower(), {"Software": None}))


def quiet(axes: Any) -> None:
    """Draw a light grid behind the data and no frame at the top and the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
