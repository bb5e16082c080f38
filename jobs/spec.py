"""A spec, its layer table and its static estimate: plain dataclasses that need neither torch nor pandas."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, Self

from vramcast.errors import UserError
from vramcast.virtual_gpu.canonical import content_hash, from_mapping, without_defaults
from vramcast.virtual_gpu.training.setup import TrainingSetup

_PARAMETERS, _ACTIVATIONS = attrgetter("parameters"), attrgetter("activations")


@dataclass(frozen=True)
class Spec:
    """A complete description of a network and its training. Specs with equal ids are the same job."""

    family: str
    network: Mapping[str, Any]
    training: TrainingSetup

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        """Content hash over everything that decides the memory."""
        return content_hash(self.to_json())

    @cached_property
    def group(self) -> str:
        """Content hash of the network: rows of one group stay together when data is split."""
        return content_hash({"family": self.family, "network": dict(self.network)})

    @cached_property
    def design(self) -> str:
        """The prefix that resnet18 and resnet50 share in their library; a network without a name is its own design."""
        name = str(self.network.get("name") or self.network.get("architecture") or "")
        letters = re.match("[A-Za-z]+", name)
        return f"{self.family}/{letters.group()}" if letters else self.group

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads, without defaults of the training."""
        return {"family": self.family, "network": dict(self.network), "training": without_defaults(self.training)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a spec; raise a UserError for unknown keys."""
        expected = {"family", "network", "training"}
        if not isinstance(values, Mapping) or values.keys() != expected:
            keys = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise UserError(f"expected a spec with the keys {sorted(expected)}, found {keys}: add or remove keys")
        for key, kind in (("family", str), ("network", Mapping), ("training", Mapping)):
            if not isinstance(values[key], kind):
                raise UserError(
                    f"expected the spec's {key} to be a {kind.__name__.lower()}, found {values[key]!r}: change it"
                )
        training = from_mapping(TrainingSetup, values["training"], "the training setup")
        return cls(values["family"], dict(values["network"]), training)


@dataclass(frozen=True)
class LayerRecord:
    """One layer in execution order. Counts are elements, of one sample.

    A source that does not know a field with the default None leaves it out; no field is guessed.
    """

    name: str
    kind: str
    """Class of torch.nn, or name of a function that no module owns."""
    output_shape: tuple[int, ...]
    """Without the batch."""
    activations: int
    """Elements of new storage for each sample: zero for views and in-place operations."""
    parameters: int
    functional: bool = False
    """True for an operation outside any layer: a residual addition, a concatenation."""
    inputs: tuple[int, ...] | None = None
    """Places in the table of the layers whose outputs it reads, ascending; NETWORK_INPUT for the network's input."""
    trainable: int | None = None
    """How many of the parameters have gradients."""
    parameter_bytes: int | None = None
    """Bytes of the parameters."""
    dtype: str | None = None
    """Of the output, by torch's name: float32, int64."""
    kernel: tuple[int, ...] | None = None
    """Of a convolution or pooling; the same for the stride and the groups."""
    stride: tuple[int, ...] | None = None
    groups: int | None = None
    saved: int | None = None
    """Floating-point elements that it is the first to keep for its backward pass: its own, or those of its inputs."""
    saved_fixed_bytes: int | None = None
    """Bytes that it keeps likewise in other dtypes, as a mask or indices: they are the same in half precision."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def basis(self) -> dict[str, Any]:
        """The fields that every source knows, which identify a network."""
        return {name: getattr(self, name) for name in _BASIS}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        tuples = {name: tuple(values[name]) for name in _TUPLES if values.get(name) is not None}
        return cls(**{**values, **tuples})


NETWORK_INPUT = -1
"""In place of a layer among the inputs of another."""
_BASIS = ("name", "kind", "output_shape", "activations", "parameters", "functional")
_TUPLES = ("output_shape", "inputs", "kernel", "stride")


@dataclass(frozen=True)
class LayerTable:
    """Layers in execution order, with their sums."""

    layers: tuple[LayerRecord, ...]
    trainable_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the parameters with gradients."""
    input_elements: int
    """Of one sample."""

    @cached_property
    def parameters(self) -> int:
        """The number of parameters, each counted once."""
        return sum(map(_PARAMETERS, self.layers))

    @cached_property
    def activations(self) -> int:
        """The elements of new storage in a forward pass of one sample, without the input."""
        return sum(map(_ACTIVATIONS, self.layers))

    @cached_property
    def trainable_elements(self) -> int:
        """The number of elements of the parameters with gradients."""
        return sum(map(prod, self.trainable_shapes))

    @property
    def counts(self) -> dict[str, int]:
        """The number of layers of each kind, without functions."""
        return dict(Counter(record.kind for record in self.layers if not record.functional))

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads, which is also the form of layer tables in requests."""
        return {
            "layers": [layer.to_json() for layer in self.layers],
            "trainable_shapes": [list(shape) for shape in self.trainable_shapes],
            "input_elements": self.input_elements,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        layers = map(LayerRecord.from_json, values["layers"])
        shapes = tuple(tuple(shape) for shape in values["trainable_shapes"])
        return cls(tuple(layers), shapes, values["input_elements"])


@dataclass(frozen=True)
class StaticEstimate:
    """SGV: the memory of a training step that follows from shapes alone."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Inputs and layer outputs of one batch."""

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
