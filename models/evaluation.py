"""A checkpoint and all baselines against a table of measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vramcast.dataset_builder.defaults import RISK
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.schema import Row
from vramcast.errors import UserError
from vramcast.models._base import Estimator
from vramcast.models.baselines.catalogue import FORMULAS, load_baselines
from vramcast.models.baselines.fake_tensor import FakeTensor, read_published
from vramcast.models.checkpoint import checkpoint_directory, load_checkpoint
from vramcast.models.comparison import Report, compare, text_table
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.models.labels import Buckets
from vramcast.models.simulation import SimulationCache
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.sizes import MIB

BASELINES = "baselines"
"""The directory of a checkpoint with the baselines that were fitted to the same examples."""


@runtime_checkable
class Bounded(Protocol):
    """An estimator that states a bound."""

    @property
    def least_risk(self) -> float:
        """The smallest risk that it can speak of."""

    def safe_bytes(self, examples: Sequence[Example], risk: float) -> NDArray[np.float64]:
        """[examples]: what a job exceeds with at most that probability."""


@dataclass(frozen=True)
class Evaluation:
    """How a checkpoint did, beside the baselines on the same rows."""

    checkpoint: str
    settings: Mapping[str, Any]
    report: Report
    baselines: Mapping[str, Report]

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's figures by name, those of the baselines below `baselines`."""
        others = {name: report.to_json() for name, report in self.baselines.items()}
        return {**self.report.to_json(), "checkpoint": self.checkpoint, **self.settings, "baselines": others}

    def to_text(self) -> str:
        """A table for people: the checkpoint with its families, then the baselines."""
        table = text_table({self.checkpoint: self.report, **self.baselines}, families_of=[self.checkpoint])
        settings = "  ".join(f"{name} {value}" for name, value in self.settings.items())
        return "\n".join([settings, table])


def evaluate_checkpoint(
    name: str,
    rows: Sequence[Row],
    table: Path,
    *,
    bucket_mib: int,
    risk: float | None,
    device: str | None,
    cache: SimulationCache,
) -> Evaluation:
    """Ask a checkpoint and the baselines about rows of a table; `device` takes the place of the one they name."""
    estimator, baselines = load_estimators(name)
    examples = examples_of_rows(rows, _profiles(rows, device), cache)
    if not examples:
        raise UserError(f"expected rows in {table} that ran or ran out of memory, found none: name another file")
    buckets = Buckets(bucket_mib * MIB, max(example.capacity_bytes for example in examples))
    safe: dict[str, NDArray[np.float64]] = {}
    if isinstance(estimator, Bounded):
        risk = max(RISK, estimator.least_risk) if risk is None else risk
        safe[name] = estimator.safe_bytes(examples, risk)
    published = {FakeTensor.name: FakeTensor(read_published(table))}
    settings = {"excluded": len(rows) - len(examples), "bucket_mib": bucket_mib, "risk": risk}
    own = compare({name: estimator}, examples, buckets, safe)[name]
    return Evaluation(name, settings, own, compare({**baselines, **published}, examples, buckets))


def load_estimators(name: str) -> tuple[Estimator, dict[str, Estimator]]:
    """A checkpoint by its path or its released name, and the baselines that came with it, else the formulas alone."""
    directory = checkpoint_directory(name)
    fitted = directory / BASELINES
    return load_checkpoint(directory), dict(load_baselines(fitted) if fitted.is_dir() else FORMULAS)


def _profiles(rows: Sequence[Row], device: str | None) -> dict[str, DeviceProfile]:
    """The profile of every device that the rows name, or one in the place of all."""
    named = sorted({str(row.provenance.device) for row in rows})
    return {name: load_profile(device or name) for name in named}
