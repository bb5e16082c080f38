"""The one evaluation loop: estimators side by side on the same measured examples."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramcast.models._base import Estimator
from vramcast.models.example import Example
from vramcast.models.labels import Buckets
from vramcast.models.metrics import Answers, Score, score, score_by_family

COLUMNS = {
    "accuracy": "accuracy",
    "macro F1": "macro_f1",
    "too low": "too_low",
    "safe too low": "safe_too_low",
    "over MiB": "over_reservation_mib",
    "median err": "median_relative_error",
    "mean err": "mean_relative_error",
}
"""Of the text table: title, and the figure below it."""


@dataclass(frozen=True)
class Report:
    """How one estimator did, on all examples and family by family."""

    overall: Score
    by_family: Mapping[str, Score]

    def to_json(self) -> dict[str, Any]:
        """The figures by name, those of the families below `by_family`."""
        families = {name: found.to_json() for name, found in self.by_family.items()}
        return {**self.overall.to_json(), "by_family": families}


def compare(
    estimators: Mapping[str, Estimator],
    examples: Sequence[Example],
    buckets: Buckets,
    safe_bytes: Mapping[str, NDArray[np.float64]] | None = None,
) -> dict[str, Report]:
    """Ask every estimator about every example.

    `safe_bytes` holds, by the estimator's name, the bound of those that state one. Of the others it is assumed that a
    scheduler sets aside the upper edge of the predicted bucket, as CARMA does with GPUMemNet's classes.
    """
    bounds = safe_bytes or {}
    return {
        name: report(answers_of(estimator, examples, buckets, bounds.get(name)))
        for name, estimator in estimators.items()
    }


def report(answers: Answers) -> Report:
    """The figures of one estimator's answers."""
    return Report(score(answers), score_by_family(answers))


def answers_of(
    estimator: Estimator,
    examples: Sequence[Example],
    buckets: Buckets,
    safe_bytes: NDArray[np.float64] | None = None,
) -> Answers:
    """What an estimator says of examples, beside what was measured."""
    targets = [example.measured for example in examples]
    used_bytes = np.array([target.used_bytes for target in targets], dtype=np.float64)
    fits = np.array([target.fits for target in targets], dtype=np.bool_)
    predicted = estimator.predict(examples, buckets)
    upper_bytes = np.append(buckets.edges_bytes[1:], np.inf)
    wanted_bytes = upper_bytes[predicted] if safe_bytes is None else safe_bytes
    card_bytes = np.array([example.capacity_bytes for example in examples], dtype=np.float64)
    point_bytes = estimator.predict_bytes(examples)
    return Answers(
        family=np.array([example.family for example in examples], dtype=np.str_),
        used_bytes=used_bytes,
        fits=fits,
        true_class=buckets.of(np.where(fits, used_bytes, np.inf)),
        predicted_class=predicted,
        point_bytes=point_bytes,
        called_too_large=point_bytes >= card_bytes,
        reserved_bytes=np.minimum(wanted_bytes, card_bytes),
        safe_class=None if safe_bytes is None else buckets.of(safe_bytes),
    )


def text_table(reports: Mapping[str, Report], families_of: Collection[str] = ()) -> str:
    """The main figures for people: a line an estimator, and of some of them one for each family."""
    lines = [["estimator", "rows", *COLUMNS]]
    for name, found in reports.items():
        lines.append(_cells(name, found.overall))
        if name in families_of:
            lines += [_cells(f"  {family}", part) for family, part in found.by_family.items()]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([f"{name:{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True))])
        for name, *cells in lines
    )


def _cells(name: str, found: Score) -> list[str]:
    figures = found.to_json()
    return [name, str(found.rows), *(_shown(key, figures[key]) for key in COLUMNS.values())]


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if key.endswith("_mib") else f"{value:.4f}"
