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


def error_table(lines: Sequence[Line], columns: Mapping[str, str]) -> str:
    """Return a Markdown table of mean errors, estimators by parts of the rows, with the best of each column in bold."""
    errors = {(line.estimator, line.part): line.mean_error for line in lines if line.mean_error is not None}
    estimators = list(dict.fromkeys(estimator for estimator, _ in errors))
    most = {part: max((line.rows or 0 for line in lines if line.part == part), default=0) for part in columns}
    whole = {(line.estimator, line.part) for line in lines if line.rows == most.get(line.part)}
    best = {
        part: min((errors[key] for key in errors.keys() & whole if key[1] == part), default=None) for part in columns
    }
    counts = ["rows", *(f"{rows:,}" for rows in most.values())]
    rows = [["estimator", *columns.values()], ["---", *["---:"] * len(columns)], counts]
    for estimator in estimators:
        cells = [_percent(errors.get((estimator, part))) for part in columns]
        rows.append([estimator, *(_bold(cell, best[part]) for cell, part in zip(cells, columns, strict=True))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bold(cell: str, best: float | None) -> str:
    return f"**{cell}**" if cell == _percent(best) != _percent(None) else cell


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if value < 0.1 else f"{value:.0%}"
