"""What all pictures share: a canvas that needs no screen, and the names of buckets."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dataset_builder.schema import MIB
from models.labels import Buckets

GIB = 2**30
DOES_NOT_FIT = "does not fit"
_DOTS_PER_INCH = 150


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is written to `path` when the block ends. Without pyplot, whose state is shared."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    # no date and no version in the file: the same run gives the same bytes
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})


def unit_of(buckets: Buckets) -> tuple[str, int]:
    """The unit in which bounds of buckets are whole numbers."""
    return ("GiB", GIB) if buckets.width_bytes % GIB == 0 else ("MiB", MIB)


def bucket_names(buckets: Buckets) -> list[str]:
    """'2-3' and so on, in the unit of `unit_of`; the last is 'does not fit'."""
    _, unit_bytes = unit_of(buckets)
    digits = ".4g" if unit_bytes == GIB else ".0f"
    edges = [f"{edge / unit_bytes:{digits}}" for edge in buckets.edges_bytes]
    return [*(f"{low}-{high}" for low, high in pairwise(edges)), DOES_NOT_FIT]


def quiet(axes: Any) -> None:
    """A light grid behind the data, and no frame above and to the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
