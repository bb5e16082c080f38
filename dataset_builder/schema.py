"""The words of the builder: what a network and its training are, what was measured, and where a row comes from.

Standard-library dataclasses only: reading a row needs neither torch nor pandas.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.records import content_hash, from_mapping, without_defaults
from vramcast.virtual_gpu.training_setup import TrainingSetup

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Spec:
    """A network and its training, fully described. Two specs with one id are the same job."""

    family: str
    network: Mapping[str, Any]
    training: TrainingSetup

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        """Content hash over all that decides the memory."""
        return content_hash(self.to_json())

    @cached_property
    def group(self) -> str:
        """Content hash of the network alone: rows of one group never part when data is split."""
        return content_hash({"family": self.family, "network": dict(self.network)})

    @cached_property
    def design(self) -> str:
        """What resnet18 and resnet50 share, told by the name that a library gives; what has none stands for itself."""
        name = str(self.network.get("name") or self.network.get("architecture") or "")
        letters = re.match("[A-Za-z]+", name)
        return f"{self.family}/{letters.group()}" if letters else self.group

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` reads back; defaults of the training are left out."""
        return {"family": self.family, "network": dict(self.network), "training": without_defaults(self.training)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a spec, refusing what it does not know."""
        expected = {"family", "network", "training"}
        if not isinstance(values, Mapping) or values.keys() != expected:
            found = sorted(values) if isinstance(values, Mapping) else type(values).__name__
            raise UserError(f"expected a spec with the keys {sorted(expected)}, found {found}: add or remove keys")
        for key, kind in (("family", str), ("network", Mapping), ("training", Mapping)):
            if not isinstance(values[key], kind):
                raise UserError(
                    f"expected the spec's {key} to be a {kind.__name__.lower()}, found {values[key]!r}: change it"
                )
        training = from_mapping(TrainingSetup, values["training"], "the training setup")
        return cls(values["family"], dict(values["network"]), training)


@dataclass(frozen=True)
class LayerRecord:
    """One layer in execution order. Counts are elements, of one sample."""

    name: str
    kind: str
    """Class of torch.nn, or name of the function for what no module owns."""
    output_shape: tuple[int, ...]
    """Without the batch."""
    activations: int
    """Elements of new storage a sample: zero for a view and for what works in place."""
    parameters: int
    functional: bool = False
    """True for an operation outside any layer: a residual addition, a concatenation."""


@dataclass(frozen=True)
class LayerTable:
    """Layers in execution order, and what they add up to."""

    layers: tuple[LayerRecord, ...]
    trainable_shapes: tuple[tuple[int, ...], ...]
    """Of the parameters that have gradients."""
    input_elements: int
    """Of one sample."""

    @property
    def parameters(self) -> int:
        """All parameters, each once."""
        return sum(record.parameters for record in self.layers)

    @property
    def activations(self) -> int:
        """All new storage of a forward pass of one sample, without the input."""
        return sum(record.activations for record in self.layers)

    @property
    def counts(self) -> dict[str, int]:
        """How many layers there are of each kind, functions left out."""
        return dict(Counter(record.kind for record in self.layers if not record.functional))

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads. Schedulers without code hand in networks in this form, too."""
        return {
            "layers": [dict(vars(layer)) for layer in self.layers],
            "trainable_shapes": [list(shape) for shape in self.trainable_shapes],
            "input_elements": self.input_elements,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a table that `to_json` wrote."""
        layers = (LayerRecord(**{**item, "output_shape": tuple(item["output_shape"])}) for item in values["layers"])
        shapes = tuple(tuple(shape) for shape in values["trainable_shapes"])
        return cls(tuple(layers), shapes, values["input_elements"])


@dataclass(frozen=True)
class StaticEstimate:
    """SGV: what the shapes alone say that training holds."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Inputs and layer outputs of one batch."""

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a row comes from. `origin` says plainly what kind of figure it is."""

    origin: str
    """'static' (shapes alone), 'simulated' (virtual GPU) or 'measured' (on a card)."""
    backend: str
    device: str | None
    """The card, or the device profile that stood for it."""
    versions: Mapping[str, str]
    seed: int | None
    time: str
    """UTC, ISO 8601."""
    source: str | None = None
    """For rows that others published: the file, and whom to cite."""
    gpu_uuid: str | None = None
    """Of the very card, where there was one."""


@dataclass(frozen=True)
class Row:
    """A spec with its static estimate and its measurement."""

    spec: Spec
    static: StaticEstimate | None
    measurement: Measurement
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` reads back."""
        return {
            "id": self.spec.id,
            "spec": self.spec.to_json(),
            # not asdict(), which copies deeply: a tenth of the time of a build
            "static": dict(vars(self.static)) if self.static else None,
            "measurement": dict(vars(self.measurement)),
            "provenance": dict(vars(self.provenance)),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a row as `to_json` wrote it."""
        measurement = {**values["measurement"], "status": Status(values["measurement"]["status"])}
        measurement["notes"] = tuple(measurement.get("notes", ()))
        static = values["static"]
        return cls(
            Spec.from_json(values["spec"]),
            StaticEstimate(**static) if static else None,
            Measurement(**measurement),
            Provenance(**values["provenance"]),
        )


@dataclass(frozen=True)
class Rejection:
    """A configuration that was drawn and cannot be trained, with the reason."""

    spec: Spec
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` reads back."""
        return {"id": self.spec.id, "spec": self.spec.to_json(), "reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a rejection as `to_json` wrote it."""
        return cls(Spec.from_json(values["spec"]), values["reason"])
