"""Figures that others published about their own estimators: cited, not computed, and marked as such in every table."""

import csv
from collections.abc import Sequence
from math import inf
from pathlib import Path

from benchmarks.field.tables import Line
from vramcast.dataset_builder.store.importers.real_networks import LAYOUT
from vramcast.models.baselines._formula import Formula
from vramcast.models.distribution import FigureDistribution, bounds_of
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB

COLUMNS = {"GPUMemNet": "gpumemnet_mib", "FakeTensor": "faketensor_mib", "Horus": "horus_mib"}
"""Columns of the table of unseen networks."""
EDGES_MIB = {"GPUMemNet": 8000}
"""Estimators whose figure is the upper edge of a bucket of this width, and so says nothing about narrower ones."""

# GPUMemNet's three folds on its own rows, CNNs without residual and dense ones (k-fold results of its repository).
# Seconds are for a batch of 128 on a GPU, without the layer summary, which runs the network on a GPU.
_FOLDS = {
    "mlp": (1000, (0.976, 0.984), (0.018, 0.008), (0.00225, 0.01056)),
    "cnn": (8000, (0.797, 0.803), (0.072, 0.078), (0.00227, 0.01074)),
    "transformer": (8000, (0.848, 0.858), (0.107, 0.064), (0.00240, 0.01073)),
}
_NAMES = ("GPUMemNet's MLP", "GPUMemNet's Transformer")


class Published(Formula):
    """A column of published estimates, by the id of the spec."""

    def __init__(self, name: str, mib_by_id: dict[str, float]) -> None:
        self.name = name
        self.mib_by_id = mib_by_id

    def used_bytes(self, example: Example) -> float:
        return self.mib_by_id.get(example.id, inf) * MIB

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> FigureDistribution:
        """Return the published figures, even above the device's capacity; an edge belongs to the bucket below it."""
        figures = self.figures_bytes(examples)
        inside = figures - (1 if self.name in EDGES_MIB else 0)
        return FigureDistribution(**bounds_of(examples), figures_bytes=inside[:, None], estimate_bytes=figures)


def read_published(path: Path) -> dict[str, Published]:
    """Read the published estimates from the table of unseen networks."""
    columns: dict[str, dict[str, float]] = {name: {} for name in COLUMNS}
    with path.open(newline="") as lines:
        for record in csv.DictReader(lines):
            spec = LAYOUT.spec(record)
            for name, column in COLUMNS.items():
                if spec is not None and record[column]:
                    columns[name][spec.id] = float(record[column])
    return {name: Published(name, mib_by_id) for name, mib_by_id in columns.items()}


def fold_lines() -> list[Line]:
    """Return GPUMemNet's accuracies as lines of the families' tables."""
    return [
        Line(
            part=part, estimator=f"{name} (published)", group="published", figure="published, 3 folds", rows=None,
            **{f"accuracy_{width}": accuracy[index]}, too_low=low[index], seconds=seconds[index],
            needs_gpu="for its layer summary",
        )
        for part, (width, accuracy, low, seconds) in _FOLDS.items()
        for index, name in enumerate(_NAMES)
    ]  # fmt: skip
