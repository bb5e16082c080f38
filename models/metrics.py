"""Metrics of estimators against measured rows: the definition of every published figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramcast.virtual_gpu.allocator.sizes import MIB

_TOO_LOW = 0.02
"""A point estimate counts as too low if it is more than this share below the measurement."""
_TAIL = 0.95


@dataclass(frozen=True)
class PredictedRows:
    """The predictions of an estimator beside the measurements: one entry for each row in every array."""

    family: NDArray[np.str_]
    stack: NDArray[np.str_]
    """The device and the time of the measurement."""
    used_bytes: NDArray[np.float64]
    """Measured; for a row that did not fit, its use when it died."""
    fits: NDArray[np.bool_]
    true_class: NDArray[np.int64]
    predicted_class: NDArray[np.int64]
    point_bytes: NDArray[np.float64]
    """Infinity for jobs that do not fit."""
    called_too_large: NDArray[np.bool_]
    """True if the point estimate is above the capacity."""
    reserved_bytes: NDArray[np.float64]
    """The amount that a scheduler reserves by this estimator, at most the capacity."""
    safe_class: NDArray[np.int64] | None = None
    """None for an estimator without a calibrated bound."""
    least_bytes: NDArray[np.float64] | None = None
    """The lower ends of measurements that are bands up to `used_bytes`; None if all are exact."""

    def where(self, chosen: NDArray[np.bool_]) -> "PredictedRows":
        """Return some of the rows."""
        parts: dict[str, Any] = {key: None if value is None else value[chosen] for key, value in vars(self).items()}
        return PredictedRows(**parts)

    @property
    def relative_errors(self) -> NDArray[np.float64]:
        """[n]: signed, negative if too low, 0 within a band; an estimate that does not fit counts as 1."""
        finite = np.isfinite(self.point_bytes)
        point_bytes = np.where(finite, self.point_bytes, 0.0)
        nearest_bytes = self.nearest_bytes(point_bytes)
        return np.where(finite, (point_bytes - nearest_bytes) / nearest_bytes, 1.0)

    def nearest_bytes(self, figures_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [n]: the measurement, or the value of its band that is nearest to a figure."""
        least_bytes = self.used_bytes if self.least_bytes is None else self.least_bytes
        return np.clip(figures_bytes, least_bytes, self.used_bytes)

    @property
    def reserved_in_band(self) -> NDArray[np.bool_]:
        """[n]: whether the measurement is a band that the reserved memory lies in, which is then not too low."""
        inside = self.nearest_bytes(self.reserved_bytes) == self.reserved_bytes
        return np.asarray(self.fits & inside, dtype=np.bool_)


@dataclass(frozen=True)
class Score:
    """The figures of one estimator. Errors and reservations are over rows that fit, shares over all rows."""

    rows: int
    accuracy: float | None
    """Share of rows in the predicted bucket; 'does not fit' is a bucket of its own."""
    macro_f1: float | None
    too_low: float | None
    """Share of rows above the predicted bucket."""
    safe_too_low: float | None
    """Share of rows above the bucket of the safe figure, None without a calibrated bound."""
    point_too_low: float | None
    """Share of the rows that fit whose point estimate is more than 2 % too low."""
    over_reservation_mib: float | None
    """Mean of the reserved memory beyond the used memory."""
    safe_over_relative_median: float | None
    """Median of the reserved memory beyond the used memory, relative to the used memory; None without a bound."""
    median_relative_error: float | None
    mean_relative_error: float | None
    p95_relative_error: float | None
    oom_recall: float | None
    oom_false_alarms: float | None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The 95 % confidence interval of each share (Wilson), and of the mean and the median over-reservation."""
    fitting_rows: int | None = None
    """Rows that fit, which the errors and the over-reservation are computed from."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def score(rows: PredictedRows) -> Score:
    """Return the figures of some rows."""
    fits, predicted, true = rows.fits, rows.predicted_class, rows.true_class
    errors = rows.relative_errors[fits]
    flags = {
        "accuracy": predicted == true,
        "too_low": predicted < true,
        "safe_too_low": np.empty(0) if rows.safe_class is None else (rows.safe_class < true) & ~rows.reserved_in_band,
        "point_too_low": errors < -_TOO_LOW,
        "oom_recall": rows.called_too_large[~fits],
        "oom_false_alarms": rows.called_too_large[fits],
    }
    ranked = np.sort(np.abs(errors))
    nearest = rows.nearest_bytes(rows.reserved_bytes)[fits]
    over_mib = (rows.reserved_bytes[fits] - nearest) / MIB
    over_relative = np.empty(0) if rows.safe_class is None else np.sort(over_mib * MIB / nearest)
    intervals = {name: wilson_interval(values) for name, values in flags.items() if len(values)}
    intervals |= {"over_reservation_mib": mean_interval(over_mib)} if len(over_mib) > 1 else {}
    intervals |= {"safe_over_relative_median": median_interval(over_relative)} if len(over_relative) else {}
    return Score(
        rows=len(true),
        macro_f1=macro_f1(true, predicted),
        over_reservation_mib=_mean(over_mib),
        safe_over_relative_median=float(np.median(over_relative)) if len(over_relative) else None,
        median_relative_error=float(np.median(ranked)) if len(ranked) else None,
        mean_relative_error=_mean(ranked),
        # the error at that rank, not a point between two
        p95_relative_error=float(ranked[min(int(_TAIL * len(ranked)), len(ranked) - 1)]) if len(ranked) else None,
        intervals=intervals,
        fitting_rows=int(fits.sum()) or None,
        **{name: fmean(values) if len(values) else None for name, values in flags.items()},
    )


def score_by(rows: PredictedRows, key: str) -> dict[str, Score]:
    """Return the figures by family, by stack or by both, in the order of the names."""
    values = np.char.add(np.char.add(rows.family, ", "), rows.stack) if key == "both" else getattr(rows, key)
    return {name: score(rows.where(values == name)) for name in sorted({str(item) for item in values})}


def wilson_interval(flags: Sequence[bool] | NDArray[np.bool_]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson, JASA 1927), which is sound near 0 and 1 too."""
    count, share = len(flags), float(fmean(flags))
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean, from its standard error."""
    half = NormalDist().inv_cdf(0.975) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def median_interval(ranked: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of sorted values, from ranks: it holds for any distribution."""
    half = NormalDist().inv_cdf(0.975) * math.sqrt(len(ranked)) / 2
    low, high = math.floor(len(ranked) / 2 - half), math.ceil(len(ranked) / 2 + half)
    return float(ranked[max(low, 0)]), float(ranked[min(high, len(ranked) - 1)])


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def macro_f1(true: NDArray[np.int64], predicted: NDArray[np.int64]) -> float | None:
    """Return the mean F1 of all classes that occur in either, as scikit-learn's `f1_score(average="macro")`."""
    classes = np.union1d(true, predicted)
    hits = np.array([np.sum((true == one) & (predicted == one)) for one in classes], dtype=np.float64)
    sizes = np.array([np.sum(true == one) + np.sum(predicted == one) for one in classes], dtype=np.float64)
    return _mean(2 * hits / sizes)
