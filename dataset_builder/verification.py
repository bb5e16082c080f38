"""Compare golden specs measured on a GPU with the virtual GPU; `vramcast device verify` prints the result."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vramcast.dataset_builder.backends import Backend
from vramcast.dataset_builder.backends.static import static_of
from vramcast.dataset_builder.executors import SerialExecutor
from vramcast.dataset_builder.golden import golden_specs
from vramcast.dataset_builder.pipeline import make_row, software_versions
from vramcast.dataset_builder.rows import SCHEMA_VERSION, Row
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.lines import HEADER, ROW, encode_line
from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement, Status

MEDIAN_ERROR = 0.05
"""Above this median error the virtual GPU does not model the GPU's software."""
WORST_ERROR = 0.25
"""The same for the largest error of a spec."""
SAFE_ERROR = 0.02
"""Estimates that are low by more are counted: a job limited to them would run out of memory."""


@dataclass(frozen=True)
class Comparison:
    """A golden spec, simulated and measured."""

    label: str
    virtual: Measurement
    measured: Measurement

    @property
    def ratio(self) -> float | None:
        """Simulated over measured reserved memory; None unless both ran."""
        return self._ratio(self.virtual.reserved_bytes, self.measured.reserved_bytes)

    @property
    def device_ratio(self) -> float | None:
        """Simulated over measured device memory, which includes the profile's context."""
        return self._ratio(self.virtual.device_used_bytes, self.measured.device_used_bytes)

    def _ratio(self, virtual_bytes: int | None, measured_bytes: int | None) -> float | None:
        ran = self.virtual.status is Status.OK is self.measured.status
        return virtual_bytes / measured_bytes if ran and virtual_bytes and measured_bytes else None

    @property
    def verdict(self) -> str:
        """'near', 'off' or 'far' by the thresholds above, or the status of a spec that did not run."""
        if self.ratio is None:
            return str(self.measured.status if self.measured.status is not Status.OK else self.virtual.status)
        error = abs(self.ratio - 1)
        return "near" if error <= MEDIAN_ERROR else "off" if error <= WORST_ERROR else "far"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        names = ("status", "reserved_bytes", "device_used_bytes", "evidence", "others_bytes", "cap_bytes", "cap_held")
        return {
            "label": self.label,
            "virtual": {name: getattr(self.virtual, name) for name in names[:4]},
            "measured": {name: getattr(self.measured, name) for name in names},
            "reserved_ratio": self.ratio,
            "device_ratio": self.device_ratio,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Verification:
    """The comparisons of all golden specs, and the verdict."""

    gpu: str
    profile: str
    comparisons: Sequence[Comparison]

    @property
    def errors(self) -> list[float]:
        """Relative errors of the reserved memory of specs that ran on both."""
        return [abs(item.ratio - 1) for item in self.comparisons if item.ratio is not None]

    @property
    def passed(self) -> bool:
        """True if all specs ran, the median error is small, and no error is large."""
        complete = len(self.errors) == len(self.comparisons)
        return complete and median(self.errors) <= MEDIAN_ERROR and max(self.errors) <= WORST_ERROR

    @property
    def too_low(self) -> int:
        """Number of estimates that were too low."""
        return sum(item.ratio is not None and item.ratio < 1 - SAFE_ERROR for item in self.comparisons)

    @property
    def contexts_mib(self) -> tuple[float | None, float | None]:
        """Median memory besides the allocator, simulated and measured."""
        return _median_overhead(item.virtual for item in self.comparisons), _median_overhead(
            item.measured for item in self.comparisons
        )

    def to_json(self) -> dict[str, Any]:
        """Return the table and the verdict as JSON values."""
        virtual_mib, measured_mib = self.contexts_mib
        return {
            "gpu": self.gpu,
            "profile": self.profile,
            "passed": self.passed,
            "median_error": median(self.errors) if self.errors else None,
            "worst_error": max(self.errors, default=None),
            "too_low": self.too_low,
            "virtual_context_mib": virtual_mib,
            "measured_context_mib": measured_mib,
            "thresholds": {"median_error": MEDIAN_ERROR, "worst_error": WORST_ERROR, "too_low": SAFE_ERROR},
            "specs": [item.to_json() for item in self.comparisons],
        }

    def to_text(self) -> str:
        """Return the table and the verdict as readable text."""
        head = (
            f"{'MiB':38} {'reserved: virtual':>18} {'measured':>9} {'ratio':>6} {'device: virtual':>16} {'measured':>9}"
        )
        lines = [f"{self.gpu} against the profile {self.profile}", f"{head} {'ratio':>6}  verdict"]
        lines += [_line(item) for item in self.comparisons]
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> list[str]:
        summary = f"{len(self.errors)} of {len(self.comparisons)} ran on both"
        if self.errors:
            summary += f"; reserved: median error {median(self.errors):.1%}, worst {max(self.errors):.1%}"
            summary += f", {self.too_low} too low by over {SAFE_ERROR:.0%}"
        virtual_mib, measured_mib = self.contexts_mib
        lines = [summary]
        if virtual_mib is not None and measured_mib is not None:
            lines.append(
                f"besides the allocator: measured {measured_mib:.0f} MiB, the profile says {virtual_mib:.0f} "
                "(context_mib and cudnn_mib of the profile)"
            )
        if caps := [item.measured.cap_held for item in self.comparisons if item.measured.cap_bytes is not None]:
            lines.append(f"as the allocator's limit {caps.count(True)} of {len(caps)} estimates were enough")
        rule = f"all run, median error up to {MEDIAN_ERROR:.0%}, worst up to {WORST_ERROR:.0%}"
        return [*lines, f"{'PASS' if self.passed else 'FAIL'} ({rule})"]


def _median_overhead(measurements: Iterable[Measurement]) -> float | None:
    overheads = [
        (item.device_used_bytes - item.reserved_bytes) / MIB
        for item in measurements
        if item.status is Status.OK and item.device_used_bytes is not None and item.reserved_bytes is not None
    ]
    return median(overheads) if overheads else None


def _line(item: Comparison) -> str:
    reserved = (item.virtual.reserved_bytes, item.measured.reserved_bytes)
    device = (item.virtual.device_used_bytes, item.measured.device_used_bytes)
    mib = ["-" if value is None else f"{value / MIB:.0f}" for value in (*reserved, *device)]
    ratios = ["-" if value is None else f"{value:.3f}" for value in (item.ratio, item.device_ratio)]
    text = f"{item.label:38} {mib[0]:>18} {mib[1]:>9} {ratios[0]:>6} {mib[2]:>16} {mib[3]:>9} {ratios[1]:>6}"
    reason = f": {item.measured.evidence}" if item.ratio is None and item.measured.evidence else ""
    return f"{text}  {item.verdict}{reason}"


def measure_golden(backend: Backend, on_row: Callable[[Row], object]) -> list[Row]:
    """Measure the golden specs with a backend and return the rows; call `on_row` with each."""
    versions, rows = software_versions(), []
    for spec, outcome in SerialExecutor().run(backend, golden_specs().values()):
        rows.append(make_row(backend, spec, outcome, None, versions, static_of(spec)))
        on_row(rows[-1])
    return rows


def read_recorded(path: Path) -> list[Row]:
    """Read measured rows of the golden specs from a file."""
    by_id = {row.spec.id: row for row in read_journal(path).rows if row.provenance.origin == "measured"}
    missing = [label for label, spec in golden_specs().items() if spec.id not in by_id]
    if missing:
        raise UserError(
            f"expected measured rows of all golden specs in {path}, found none of {missing}: "
            "create the file again with vramcast device verify --record FILE"
        )
    return [by_id[spec.id] for spec in golden_specs().values()]


def write_recorded(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a journal."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(encode_line(HEADER, {"schema": SCHEMA_VERSION, "build": {"golden": len(golden_specs())}}))
        file.writelines(encode_line(ROW, row.to_json()) for row in rows)


def compare(virtual: Sequence[Row], measured: Sequence[Row], profile: str) -> Verification:
    """Compare simulated and measured rows spec by spec."""
    simulated: Mapping[str, Measurement] = {row.spec.id: row.measurement for row in virtual}
    labels = {spec.id: label for label, spec in golden_specs().items()}
    comparisons = [Comparison(labels[row.spec.id], simulated[row.spec.id], row.measurement) for row in measured]
    return Verification(measured[0].provenance.device or "unknown", profile, comparisons)
