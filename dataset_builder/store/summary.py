"""Counts of the rows and rejections in a journal."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vramcast.dataset_builder.rows import Rejection, Row
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status

_REASONS_SHOWN = 12
_BUCKETS_SHOWN = 20


@dataclass
class Summary:
    """Counts of a journal. Buckets count the rows with status OK."""

    bucket_mib: int
    families: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    buckets: Counter[int] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "rows": self.families.total(),
            "families": dict(self.families),
            "statuses": dict(self.statuses),
            "origins": dict(self.origins),
            "bucket_mib": self.bucket_mib,
            "buckets": {str(index): count for index, count in sorted(self.buckets.items())},
            "rejected": self.rejections.total(),
            "rejections": dict(self.rejections.most_common()),
        }

    def to_text(self) -> str:
        """Return the counts as readable text."""
        lines = [f"{self.families.total()} rows, {self.rejections.total()} configurations rejected"]
        lines += [f"  {title}: {_counts(counter)}" for title, counter in self._tables() if counter]
        if self.buckets:
            lines.append(f"  peak, in buckets of {self.bucket_mib} MiB:")
            lines += _bars(self._shown_buckets())
        if self.rejections:
            lines.append("  rejected because:")
            lines += [f"    {count:6d}  {reason}" for reason, count in self.rejections.most_common(_REASONS_SHOWN)]
            hidden = len(self.rejections) - _REASONS_SHOWN
            lines += [f"            and {hidden} more reasons (--json lists all)"] if hidden > 0 else []
        return "\n".join(lines)

    def _tables(self) -> list[tuple[str, Counter[str]]]:
        return [("family", self.families), ("status", self.statuses), ("origin", self.origins)]

    def _shown_buckets(self) -> dict[str, int]:
        """Return the lowest buckets, and all above them as one: a few peaks are a hundred times larger."""
        buckets = sorted(self.buckets.items())
        shown = buckets if len(buckets) <= _BUCKETS_SHOWN else buckets[: _BUCKETS_SHOWN - 1]
        bars = {f"{i * self.bucket_mib}-{(i + 1) * self.bucket_mib}": count for i, count in shown}
        if len(shown) < len(buckets):
            above = buckets[len(shown) :]
            bars[f"{above[0][0] * self.bucket_mib} and more"] = sum(count for _, count in above)
        return bars


def summarise(records: Iterable[Row | Rejection], bucket_mib: int) -> Summary:
    """Count the records of a journal."""
    summary = Summary(bucket_mib)
    for record in records:
        if isinstance(record, Rejection):
            summary.rejections[kind_of(record.reason)] += 1
            continue
        summary.families[record.spec.family] += 1
        summary.statuses[record.measurement.status.value] += 1
        summary.origins[record.provenance.origin] += 1
        peak = record.measurement.peak_bytes
        if record.measurement.status is Status.OK and peak is not None:
            summary.buckets[peak // (bucket_mib * MIB)] += 1
    return summary


def kind_of(reason: str) -> str:
    """Return a reason without layer names and values, so that similar reasons count together."""
    return re.sub(r" at '[^']*'|, found .*", "", reason)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def _bars(counts: dict[str, int], width: int = 40) -> list[str]:
    most, name_width = max(counts.values()), max(map(len, counts))
    return [
        f"    {name:>{name_width}} {count:6d} {'#' * max(1, count * width // most)}" for name, count in counts.items()
    ]
