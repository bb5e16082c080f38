"""A canvas that needs no screen. It imports matplotlib, and is imported itself only where something is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DOTS_PER_INCH = 150
_UNNAMED = {".svg": {"Date": None, "Creator": None}}
"""No date and no version in a file: the same table gives the same bytes."""


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is written to `path` when the block ends. Without pyplot, whose state is shared."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=_UNNAMED.get(path.suffix.lower(), {"Software": None}))


def quiet(axes: Any) -> None:
    """A light grid behind the data, and no frame above and to the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
