"""How good point estimates of memory are, against measured rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

_TOO_LOW = 0.02
"""An estimate counts as too low when it is more than this share below the truth."""


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
    """The metrics of a set of rows."""
    completed, died = [row for row in rows if not row.oom], [row for row in rows if row.oom]
    errors = sorted(abs(row.relative_error) for row in completed)
    return Metrics(
        rows=len(rows),
        excluded=excluded,
        median_relative_error=median(errors) if errors else None,
        mean_relative_error=fmean(errors) if errors else None,
        p95_relative_error=errors[min(int(0.95 * len(errors)), len(errors) - 1)] if errors else None,
        too_low=_share([row.relative_error < -_TOO_LOW for row in completed]),
        accuracy=_share([_bucket_is_right(row, bucket_mib) for row in rows]),
        oom_recall=_share([row.estimate_mib is None for row in died]),
        oom_false_alarms=_share([row.estimate_mib is None for row in completed]),
    )


def _share(flags: Sequence[bool]) -> float | None:
    return fmean(flags) if flags else None


def _bucket_is_right(row: Judged, bucket_mib: int) -> bool:
    if row.oom or row.estimate_mib is None:
        return row.oom and row.estimate_mib is None
    return row.actual_mib // bucket_mib == row.estimate_mib // bucket_mib
