"""The evaluation loop: estimators side by side on the same measured examples."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets
from vramcast.models.estimators._base import Estimator
from vramcast.models.example import Example
from vramcast.models.metrics import PredictedRows, Score, score, score_by

COLUMNS = {
    "accuracy": "accuracy",
    "macro F1": "macro_f1",
    "too low": "too_low",
    "safe too low": "safe_too_low",
    "over MiB": "over_reservation_mib",
    "safe over": "safe_over_relative_median",
    "median err": "median_relative_error",
    "mean err": "mean_relative_error",
}
"""Columns of the text table: title and figure."""


@dataclass(frozen=True)
class EstimatorReport:
    """The figures of one estimator: on all examples, by family, and by stack if there are several.

    Rows with batches of unknown lengths are a family of their own.
    """

    overall: Score
    by_family: Mapping[str, Score]
    by_stack: Mapping[str, Score] = field(default_factory=dict)
    by_both: Mapping[str, Score] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name, with those of families below `by_family`, and of stacks if there are several."""
        parts = {"by_family": self.by_family}
        if len(self.by_stack) > 1:
            parts |= {"by_stack": self.by_stack, "by_family_and_stack": self.by_both}
        figures = {key: {name: item.to_json() for name, item in part.items()} for key, part in parts.items()}
        return {**self.overall.to_json(), **figures}


def compare(
    estimators: Mapping[str, Estimator],
    examples: Sequence[Example],
    buckets: Buckets,
    safe_bytes: Mapping[str, NDArray[np.float64]] | None = None,
) -> dict[str, EstimatorReport]:
    """Evaluate every estimator on every example.

    `safe_bytes` holds the calibrated bounds by the estimator's name. For others a scheduler is taken to reserve the
    upper edge of the predicted bucket, as CARMA does with GPUMemNet's classes.
    """
    bounds = safe_bytes or {}
    return {
        name: report_of(predicted_rows(estimator, examples, buckets, bounds.get(name)))
        for name, estimator in estimators.items()
    }


def report_of(rows: PredictedRows) -> EstimatorReport:
    """Return the report on predicted rows."""
    return EstimatorReport(score(rows), score_by(rows, "family"), score_by(rows, "stack"), score_by(rows, "both"))


def predicted_rows(
    estimator: Estimator,
    examples: Sequence[Example],
    buckets: Buckets,
    safe_bytes: NDArray[np.float64] | None = None,
) -> PredictedRows:
    """Return the predictions of an estimator beside the labels."""
    return rows_of(
        estimator.predict(examples, buckets), estimator.predict_bytes(examples), examples, buckets, safe_bytes
    )


def rows_of(
    predicted: NDArray[np.int64],
    point_bytes: NDArray[np.float64],
    examples: Sequence[Example],
    buckets: Buckets,
    safe_bytes: NDArray[np.float64] | None = None,
) -> PredictedRows:
    """Return predicted classes and point estimates beside the labels."""
    labels = [example.measured for example in examples]
    used_bytes = np.array([label.used_bytes for label in labels], dtype=np.float64)
    fits = np.array([label.fits for label in labels], dtype=np.bool_)
    upper_bytes = np.append(buckets.edges_bytes[1:], np.inf)
    wanted_bytes = upper_bytes[predicted] if safe_bytes is None else safe_bytes
    capacity_bytes = np.array([example.capacity_bytes for example in examples], dtype=np.float64)
    return PredictedRows(
        family=np.array([_family(example) for example in examples], dtype=np.str_),
        stack=np.array([f"{example.source} {example.time}".strip() for example in examples], dtype=np.str_),
        used_bytes=used_bytes,
        fits=fits,
        true_class=buckets.of(np.where(fits, used_bytes, np.inf)),
        predicted_class=predicted,
        point_bytes=point_bytes,
        called_too_large=point_bytes >= capacity_bytes,
        reserved_bytes=np.minimum(wanted_bytes, capacity_bytes),
        safe_class=None if safe_bytes is None else buckets.of(safe_bytes),
        least_bytes=np.array([label.least_used_bytes or label.used_bytes for label in labels], dtype=np.float64),
    )


def _family(example: Example) -> str:
    return f"{example.family}, varying lengths" if example.measured.varying else example.family


def text_table(reports: Mapping[str, EstimatorReport], families_of: Collection[str] = ()) -> str:
    """Return the main figures as text: a line for each estimator, and one for each family of some of them."""
    lines = [["estimator", "rows", *COLUMNS]]
    for name, report in reports.items():
        lines.append(_cells(name, report.overall))
        if name in families_of:
            lines += [_cells(f"  {family}", part) for family, part in report.by_family.items()]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([f"{name:{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True))])
        for name, *cells in lines
    )


def _cells(name: str, item: Score) -> list[str]:
    figures = item.to_json()
    return [name, str(item.rows), *(_shown(key, figures[key], item.intervals) for key in COLUMNS.values())]


def _shown(key: str, value: float | None, intervals: Mapping[str, tuple[float, float]]) -> str:
    if value is None:
        return "-"
    digits, interval_digits = (0, 0) if key.endswith("_mib") else (4, 3)
    text = f"{value:.{digits}f}"
    low, high = (f"{bound:.{interval_digits}f}" for bound in intervals.get(key, (0.0, 0.0)))
    return f"{text} [{low}, {high}]" if key in intervals else text
