"""What an inspection finds, in a form that goes through a pipe: the process that ran foreign code is not unpickled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vramcast.dataset_builder.schema import LayerTable
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training_setup import TrainingSetup


@dataclass(frozen=True)
class LayerCost:
    """What one layer holds when the memory peaks."""

    name: str
    kind: str
    held_bytes: Mapping[str, int]
    """By use."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.held_bytes.values())


@dataclass(frozen=True)
class Findings:
    """A network under one training setup, on some devices."""

    table: LayerTable
    training: TrainingSetup
    """As it was run: with the loss and the optimizer that the network brings along, if it does."""
    measurements: Mapping[str, Measurement]
    """By device; and below, what it would take if that device had no end."""
    endless: Mapping[str, Measurement]
    costs: tuple[LayerCost, ...] = ()
    """At the peak on the first device, the costliest first; without end, lest the peak be cut off."""
    family: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` reads back."""
        return {
            "table": self.table.to_json(),
            "training": dict(vars(self.training)),
            "measurements": {name: dict(vars(item)) for name, item in self.measurements.items()},
            "endless": {name: dict(vars(item)) for name, item in self.endless.items()},
            "costs": [[item.name, item.kind, dict(item.held_bytes)] for item in self.costs],
            "family": self.family,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read findings as `to_json` wrote them."""
        return cls(
            table=LayerTable.from_json(values["table"]),
            training=TrainingSetup(**values["training"]),
            measurements={name: _measurement(item) for name, item in values["measurements"].items()},
            endless={name: _measurement(item) for name, item in values["endless"].items()},
            costs=tuple(LayerCost(*item) for item in values["costs"]),
            family=values["family"],
            notes=tuple(values["notes"]),
        )


def _measurement(values: Mapping[str, Any]) -> Measurement:
    return Measurement(**{**values, "status": Status(values["status"]), "notes": tuple(values["notes"])})


@dataclass(frozen=True)
class Curve:
    """Memory over the course of a training run, thinned to some hundred points."""

    requested_bytes: Mapping[str, list[int]] = field(default_factory=dict)
    """By use."""
    reserved_bytes: list[int] = field(default_factory=list)
    context_bytes: int = 0
    capacity_bytes: int = 0
    """Of the device, with what its driver leaves."""
