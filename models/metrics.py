"""How good estimates of memory are, against measured rows: the home of every figure that is told of an estimator."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramcast.virtual_gpu.sizes import MIB

_TOO_LOW = 0.02
"""A point estimate counts as too low when it is more than this share below the truth."""
_TAIL = 0.95


@dataclass(frozen=True)
class Judged:
    """One measured row with what was estimated for it."""

    name: str
    actual_mib: float
    """Where an out-of-memory row died: no need, only a bound."""
    oom: bool
    estimate_mib: float | None
    """None where the estimator says that the job does not fit."""
    stack: str = ""
    """What it was measured on, and when."""

    @property
    def relative_error(self) -> float:
        """Signed: negative is too low. An estimate that does not fit counts as wrong by the whole."""
        return (self.estimate_mib - self.actual_mib) / self.actual_mib if self.estimate_mib is not None else 1.0


@dataclass(frozen=True)
class Metrics:
    """Figures over completed rows; the last two over out-of-memory rows and completed ones."""

    rows: int
    excluded: int
    median_relative_error: float | None
    mean_relative_error: float | None
    p95_relative_error: float | None
    too_low: float | None
    accuracy: float | None
    """Share of all rows whose bucket is right; 'does not fit' is a bucket of its own."""
    oom_recall: float | None
    oom_false_alarms: float | None

    def to_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


def judge(rows: Sequence[Judged], bucket_mib: int, excluded: int = 0) -> Metrics:
    """The metrics of point estimates."""
    completed, died = [row for row in rows if not row.oom], [row for row in rows if row.oom]
    errors = np.array([abs(row.relative_error) for row in completed])
    return Metrics(
        rows=len(rows),
        excluded=excluded,
        **_error_figures(errors),
        too_low=_share([row.relative_error < -_TOO_LOW for row in completed]),
        accuracy=_share([_bucket_is_right(row, bucket_mib) for row in rows]),
        oom_recall=_share([row.estimate_mib is None for row in died]),
        oom_false_alarms=_share([row.estimate_mib is None for row in completed]),
    )


def _share(flags: Sequence[bool] | NDArray[np.bool_]) -> float | None:
    return fmean(flags) if len(flags) else None


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _error_figures(errors: NDArray[np.float64]) -> dict[str, float | None]:
    """Of unsigned relative errors; the tail is the error itself at that rank, not a point between two."""
    ranked = np.sort(errors)
    tail = float(ranked[min(int(_TAIL * len(ranked)), len(ranked) - 1)]) if len(ranked) else None
    return {
        "median_relative_error": float(np.median(ranked)) if len(ranked) else None,
        "mean_relative_error": _mean(ranked),
        "p95_relative_error": tail,
    }


def _bucket_is_right(row: Judged, bucket_mib: int) -> bool:
    if row.oom or row.estimate_mib is None:
        return row.oom and row.estimate_mib is None
    return row.actual_mib // bucket_mib == row.estimate_mib // bucket_mib


@dataclass(frozen=True)
class Answers:
    """What an estimator said of rows, beside what is true of them: one entry a row in every array."""

    family: NDArray[np.str_]
    used_bytes: NDArray[np.float64]
    """Measured; for a row that did not fit, where it died."""
    fits: NDArray[np.bool_]
    true_class: NDArray[np.int64]
    predicted_class: NDArray[np.int64]
    point_bytes: NDArray[np.float64]
    """Infinity for what does not fit."""
    called_too_large: NDArray[np.bool_]
    """Whether the point estimate is beyond the card."""
    reserved_bytes: NDArray[np.float64]
    """What a scheduler that trusts the estimator sets aside, at most the card."""
    safe_class: NDArray[np.int64] | None = None
    """None for an estimator without a safe bucket."""

    def of_family(self, name: str) -> "Answers":
        """Those of one family."""
        chosen = self.family == name
        parts: dict[str, Any] = {key: None if value is None else value[chosen] for key, value in vars(self).items()}
        return Answers(**parts)


@dataclass(frozen=True)
class Score:
    """The figures of one estimator. Errors and reservations are over rows that fit, the others over all rows."""

    rows: int
    accuracy: float | None
    macro_f1: float | None
    too_low: float | None
    """Share whose predicted bucket is below the true one."""
    safe_too_low: float | None
    """The same of the safe bucket, None where there is none."""
    over_reservation_mib: float | None
    """Mean of what is set aside beyond what is used."""
    median_relative_error: float | None
    mean_relative_error: float | None
    p95_relative_error: float | None
    oom_recall: float | None
    oom_false_alarms: float | None

    def to_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


def score(answers: Answers) -> Score:
    """The figures of answers."""
    fits, predicted, true = answers.fits, answers.predicted_class, answers.true_class
    used_bytes = answers.used_bytes[fits]
    called = answers.called_too_large
    return Score(
        rows=len(true),
        accuracy=_share(predicted == true),
        macro_f1=macro_f1(true, predicted),
        too_low=_share(predicted < true),
        safe_too_low=None if answers.safe_class is None else _share(answers.safe_class < true),
        over_reservation_mib=_mean((answers.reserved_bytes[fits] - used_bytes) / MIB),
        **_error_figures(_relative_errors(answers.point_bytes[fits], used_bytes)),
        oom_recall=_share(called[~fits]),
        oom_false_alarms=_share(called[fits]),
    )


def score_by_family(answers: Answers) -> dict[str, Score]:
    """The figures of each family, in the order of their names."""
    names = sorted({str(name) for name in answers.family})
    return {name: score(answers.of_family(name)) for name in names}


def _relative_errors(point_bytes: NDArray[np.float64], used_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Unsigned. An estimate that does not fit counts as wrong by the whole, as in `Judged`."""
    finite = np.isfinite(point_bytes)
    return np.where(finite, np.abs(np.where(finite, point_bytes, 0.0) - used_bytes) / used_bytes, 1.0)


def macro_f1(true: NDArray[np.int64], predicted: NDArray[np.int64]) -> float | None:
    """The mean F1 of all classes that occur in either, as scikit-learn's `f1_score(average="macro")`."""
    classes = np.union1d(true, predicted)
    hits = np.array([np.sum((true == one) & (predicted == one)) for one in classes], dtype=np.float64)
    sizes = np.array([np.sum(true == one) + np.sum(predicted == one) for one in classes], dtype=np.float64)
    return _mean(2 * hits / sizes)
