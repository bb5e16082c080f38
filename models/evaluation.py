"""Evaluate an estimator and the baselines on a table of measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.table_store import TableStore
from vramcast.defaults import RISK
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.models.baselines.scheduled import Scheduled
from vramcast.models.baselines.static import Static
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.buckets import Buckets
from vramcast.models.checkpoint import load_checkpoint
from vramcast.models.comparison import EstimatorReport, compare, predicted_rows, text_table
from vramcast.models.estimators._base import Estimator
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.models.released import checkpoint_directory
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import DeviceProfile

BACKENDS: Mapping[str, Estimator] = {item.name: item for item in (Virtual(), Static(), Scheduled())}
"""Backends as estimators, which learn nothing."""


@dataclass(frozen=True)
class WorstRow:
    """A row with a large error."""

    spec: Mapping[str, Any]
    stack: str
    measured_mib: float
    estimate_mib: float | None
    """None if the estimator says that the job does not fit."""
    relative_error: float


@dataclass(frozen=True)
class Evaluation:
    """The figures of an estimator and of the baselines on the same rows."""

    name: str
    settings: Mapping[str, Any]
    report: EstimatorReport
    baselines: Mapping[str, EstimatorReport] = field(default_factory=dict)
    worst: Sequence[WorstRow] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the estimator's figures by name, with those of the baselines below `baselines`."""
        others = {name: report.to_json() for name, report in self.baselines.items()}
        worst = {"worst": [dict(vars(item)) for item in self.worst]} if self.worst else {}
        return {**self.report.to_json(), "estimator": self.name, **self.settings, "baselines": others, **worst}

    def to_text(self) -> str:
        """Return a table: the estimator with its families, the baselines, and the worst rows."""
        table = text_table({self.name: self.report, **self.baselines}, families_of=[self.name])
        settings = "  ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)
        worst = [
            f"{item.relative_error:+8.1%} measured {item.measured_mib:8.0f} estimated {item.estimate_mib} "
            f"{item.stack} {item.spec}"
            for item in self.worst
        ]
        return "\n".join([settings, table, *worst])


@dataclass(frozen=True)
class EvaluationSettings:
    """How rows are evaluated."""

    bucket_mib: int
    device: str | None = None
    """A profile in place of the one that each row was measured on."""
    risk: float | None = None
    worst: int = 0


def evaluate(
    name: str,
    estimator: Estimator,
    baselines: Mapping[str, Estimator],
    rows: Sequence[Row],
    settings: EvaluationSettings,
    store: SimulationStore,
) -> Evaluation:
    """Evaluate an estimator and the baselines on measured rows.

    An estimator of layer tables is compared with baselines of its kind, and nothing is simulated.
    """
    if not estimator.needs_simulation:
        baselines = {other: item for other, item in baselines.items() if not item.needs_simulation}
    source = store if estimator.needs_simulation else TableStore(store.directory)
    examples = examples_of_rows(rows, _profiles(rows, settings.device), source)
    if not examples:
        raise UserError("expected rows that ran or ran out of memory, found none: name another file")
    buckets = Buckets(settings.bucket_mib * MIB, max(example.capacity_bytes for example in examples))
    risk = max(RISK, estimator.least_risk) if settings.risk is None else settings.risk
    safe = estimator.safe_bytes(examples, risk)
    report = compare({name: estimator}, examples, buckets, {} if safe is None else {name: safe})[name]
    shown = {
        "excluded": len(rows) - len(examples),
        "bucket_mib": settings.bucket_mib,
        "risk": None if safe is None else risk,
        "profile": ", ".join(dict.fromkeys(example.source for example in examples)),
    }
    worst = _worst(estimator, examples, rows, buckets, settings.worst) if settings.worst else ()
    return Evaluation(name, shown, report, compare(baselines, examples, buckets), worst)


def _worst(
    estimator: Estimator, examples: Sequence[Example], rows: Sequence[Row], buckets: Buckets, count: int
) -> list[WorstRow]:
    specs = {row.spec.id: row.spec for row in rows}
    predicted = predicted_rows(estimator, examples, buckets)
    ran_out_as_predicted = ~predicted.fits & predicted.called_too_large
    errors: NDArray[np.float64] = np.where(ran_out_as_predicted, 0.0, predicted.relative_errors)
    return [
        WorstRow(
            specs[examples[index].id].to_json(),
            str(predicted.stack[index]),
            float(predicted.used_bytes[index]) / MIB,
            float(predicted.point_bytes[index]) / MIB if np.isfinite(predicted.point_bytes[index]) else None,
            float(errors[index]),
        )
        for index in np.argsort(-np.abs(errors), kind="stable")[:count]
    ]


def load_estimators(name: str) -> tuple[Estimator, Mapping[str, Estimator]]:
    """Return a checkpoint by its path or released name, and the baselines that need no fitting."""
    # imported here, because a backend is evaluated without scikit-learn
    from vramcast.models.baselines.catalogue import FORMULAS  # noqa: PLC0415

    return load_checkpoint(checkpoint_directory(name)), FORMULAS


def _profiles(rows: Sequence[Row], device: str | None) -> dict[str, DeviceProfile]:
    """Return the profile of every device that the rows name, or one in place of all."""
    names = sorted({str(row.provenance.device) for row in rows})
    return {name: load_profile(device or name) for name in names}
