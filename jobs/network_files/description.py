"""What a file says about a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vramcast.jobs.spec import LayerTable
from vramcast.virtual_gpu.canonical import without_defaults
from vramcast.virtual_gpu.training.setup import TrainingSetup


@dataclass(frozen=True)
class NetworkDescription:
    """A network without code to run: its layers, and how sure they are."""

    table: LayerTable
    notes: tuple[str, ...] = ()
    widest: LayerTable | None = None
    """Layers with the largest activations that are likely, if those of `table` are inferred: the safe figure's."""
    training: TrainingSetup | None = None
    """The training that a network was built with; None if the options alone describe it."""
    family: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what a child process tells of a network that it built."""
        training = None if self.training is None else without_defaults(self.training)
        return {"table": self.table.to_json(), "notes": list(self.notes), "training": training, "family": self.family}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        training = None if values["training"] is None else TrainingSetup(**values["training"])
        table = LayerTable.from_json(values["table"])
        return cls(table, tuple(values["notes"]), training=training, family=values["family"])
