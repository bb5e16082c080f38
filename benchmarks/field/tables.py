"""Turns predictions into the lines of the tables, and lines into Markdown and CSV."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets
from vramcast.models.comparison import predicted_rows
from vramcast.models.estimators._base import Estimator
from vramcast.models.example import Example
from vramcast.models.metrics import PredictedRows, Score, score
from vramcast.virtual_gpu.allocator.sizes import MIB

WIDTHS_MIB = (1000, 2000, 8000)
"""Bucket widths: GPUMemNet's for MLPs, twice that, and GPUMemNet's for CNNs and Transformers."""
OVERALL = "overall"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One estimator on one part of the rows."""

    part: str
    estimator: str
    group: str
    """'ours', 'field' or 'published'."""
    figure: str
    """The kind of its estimate: computed, simulated, learned or published."""
    rows: int | None
    median_error: float | None = None
    mean_error: float | None = None
    p95_error: float | None = None
    accuracy_1000: float | None = None
    accuracy_2000: float | None = None
    accuracy_8000: float | None = None
    too_low: float | None = None
    over_reservation_mib: float | None = None
    seconds: float | None = None
    needs_gpu: str = "no"


@dataclass(frozen=True)
class Predictions:
    """The predictions of an estimator for all examples, by bucket width."""

    by_width: Mapping[int, PredictedRows]
    supported: NDArray[np.bool_]
    """A mask of the examples that the estimator supports."""

    @property
    def point_bytes(self) -> NDArray[np.float64]:
        """Return point estimates; NaN for unsupported examples."""
        estimates = np.full(len(self.supported), np.nan)
        estimates[self.supported] = self.by_width[WIDTHS_MIB[0]].point_bytes
        return estimates


def predict(estimator: Estimator, examples: Sequence[Example], supported: NDArray[np.bool_]) -> Predictions:
    """Let an estimator predict the examples that it supports."""
    chosen = [example for example, included in zip(examples, supported, strict=True) if included]
    capacity_bytes = max(example.capacity_bytes for example in examples)
    buckets = {width: Buckets(width * MIB, capacity_bytes) for width in WIDTHS_MIB}
    return Predictions({width: predicted_rows(estimator, chosen, item) for width, item in buckets.items()}, supported)


def line_of(predictions: Predictions, mask: NDArray[np.bool_], template: Line, narrowest_mib: int = 0) -> Line | None:
    """Return the figures of one part of the examples, or None if the estimator supports none of them.

    A scheduler is assumed to reserve the upper edge of the predicted bucket of 1000 MiB.
    """
    inside = mask[predictions.supported]
    if not inside.any():
        return None
    scores = {width: _score(answers, inside) for width, answers in predictions.by_width.items()}
    first = scores[WIDTHS_MIB[0]]
    accuracies = {f"accuracy_{width}": item.accuracy for width, item in scores.items() if width >= narrowest_mib}
    return replace(
        template,
        rows=first.rows,
        median_error=first.median_relative_error,
        mean_error=first.mean_relative_error,
        p95_error=first.p95_relative_error,
        too_low=first.too_low,
        over_reservation_mib=first.over_reservation_mib,
        **accuracies,
    )


def _score(rows: PredictedRows, inside: NDArray[np.bool_]) -> Score:
    return score(rows.where(inside))


def to_frame(lines: Iterable[Line]) -> pd.DataFrame:
    """Return the lines as a table with the columns of the CSV."""
    return pd.DataFrame([asdict(line) for line in lines], columns=[item.name for item in fields(Line)])


HEADS = (
    "estimator", "its figure is", "rows", "median", "mean", "p95", "1 GB", "2 GB", "8 GB", "too low", "over MiB",
    "CPU s", "needs a GPU",
)  # fmt: skip


def markdown_table(lines: Sequence[Line]) -> str:
    """Return a Markdown table with the best cell of each column in bold."""
    best = _best(lines)
    most = max((line.rows or 0 for line in lines), default=0)
    rows = [_cells(line, best, most) for line in lines]
    marks = ["---", "---", *["---:"] * (len(HEADS) - 3), "---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADS, marks, *rows))


_HIGHER = ("accuracy_1000", "accuracy_2000", "accuracy_8000")
_LOWER = ("median_error", "mean_error", "p95_error", "too_low")


def _best(lines: Sequence[Line]) -> dict[str, str]:
    """Return the best formatted cell of each column, among the estimators that support all rows."""
    most = max((line.rows or 0 for line in lines), default=0)
    best = {}
    for name, choose in [*((name, max) for name in _HIGHER), *((name, min) for name in _LOWER)]:
        values = [getattr(line, name) for line in lines if line.rows == most and getattr(line, name) is not None]
        if values:
            best[name] = _formatted(name, choose(values))
    return best


def _cells(line: Line, best: Mapping[str, str], most: int) -> list[str]:
    def cell(name: str) -> str:
        text = _formatted(name, getattr(line, name))
        return f"**{text}**" if best.get(name) == text and line.rows == most else text

    rows = "" if line.rows is None else f"{line.rows:,}"
    seconds = "" if line.seconds is None else f"{line.seconds:.2g}"
    figures = [
        cell(name) for name in ("median_error", "mean_error", "p95_error", *_HIGHER, "too_low", "over_reservation_mib")
    ]
    return [line.estimator, line.figure, rows, *figures, seconds, line.needs_gpu]


def _formatted(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("accuracy"):
        return f"{value:.3f}"
    if name.endswith("_mib"):
        return f"{value:,.0f}"
    return f"{value:.2%}" if value < 0.1 else f"{value:.0%}"
