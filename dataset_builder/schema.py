"""The words of the builder: what a network and its training are, what was measured, and where a row comes from.

Standard-library dataclasses only: reading a row needs neither torch nor pandas.
"""

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Self, TypeVar

from dataset_builder.errors import UserError, check_choice, check_count, check_flag

SCHEMA_VERSION = 1
MIB = 2**20

LOSSES = ("cross_entropy", "bce_with_logits", "bce", "mse", "own")
"""'own' is for networks that compute their loss themselves and answer with it, as those of transformers do."""
IMPLEMENTATIONS = ("default", "foreach", "fused", "single")
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

T = TypeVar("T")


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any) -> str:
    """128 bits of SHA-256 over the canonical text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def without_defaults(instance: Any) -> dict[str, Any]:
    """The fields that differ from their default, so that a field added later changes no hash."""
    return {
        item.name: value
        for item in fields(instance)
        if (value := getattr(instance, item.name)) != item.default or item.default is MISSING
    }


@cache
def _field_names(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """All fields of a dataclass, and those without a default."""
    required = {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}
    return frozenset(item.name for item in fields(cls)), frozenset(required)


def from_mapping(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from a mapping, naming the keys that are unknown or missing."""
    known, required = _field_names(cls)  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known)
    if unknown:
        raise UserError(f"expected {what} to have only {sorted(known)}, found {unknown}: remove or rename them")
    missing = sorted(required - values.keys())
    if missing:
        raise UserError(f"expected {what} to have {missing}, found {sorted(values)}: add them")
    return cls(**values)


@lru_cache(maxsize=1024)  # bounded: a service is asked for whatever its clients write
def parse_call(text: str) -> tuple[str, Mapping[str, Any]]:
    """Split 'SGD(momentum=0.9)' into its name and its keyword arguments."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, MappingProxyType({})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            arguments = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
            if len(arguments) == len(node.keywords):  # none twice, and no '**'
                return node.func.id, MappingProxyType(arguments)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: too deeply nested
        pass
    raise UserError(f"expected a name such as 'Adam' or 'SGD(momentum=0.9)', found {text!r}: write it like that")


def canonical_call(text: str) -> str:
    """One text for one call: 'Adam()' is 'Adam', and arguments stand in order."""
    return _call_text(*parse_call(text))


def _call_text(name: str, arguments: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{key}={arguments[key]!r}" for key in sorted(arguments))
    return f"{name}({inner})" if inner else name


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a network is trained, as far as it decides the memory. What is said in two ways is kept in one."""

    batch_size: int
    last_batch_size: int | None = None
    """The odd last batch of an epoch, None where the batches come out even."""
    loss: str = "cross_entropy"
    optimizer: str = "Adam"
    """A class of torch.optim, with arguments where they matter: 'SGD(momentum=0.9)'."""
    implementation: str = "default"
    """Which implementation of the optimizer: 'default' is what torch picks on CUDA."""
    dtype: str = "fp32"
    """Of parameters and inputs."""
    autocast: str | None = None
    """'bf16' or 'fp16' for mixed precision."""
    accumulate: int = 1
    """Backward passes to one optimizer step."""
    checkpointing: bool = False
    """Each block of the trunk is recomputed in the backward pass."""
    dry_run_batch_size: int | None = None
    """Batch of the forward passes before training (a layer summary, say), None where there were none."""
    dry_run_passes: int = 1
    prefetched_batches: int = 0
    """Batches that a loader puts on the device ahead of time, on a stream of its own."""
    cudnn_benchmark: bool = False
    """torch.backends.cudnn.benchmark: cuDNN tries its algorithms at the first call of each shape."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "last_batch_size", "accumulate", "dry_run_batch_size", "dry_run_passes"):
            if getattr(self, name) is not None:
                check_count(f"training.{name}", getattr(self, name))
        check_count("training.prefetched_batches", self.prefetched_batches, least=0)
        check_choice("training.loss", self.loss, LOSSES)
        check_choice("training.implementation", self.implementation, IMPLEMENTATIONS)
        check_choice("training.dtype", self.dtype, DTYPE_BYTES)
        check_choice("training.autocast", self.autocast, (None, "bf16", "fp16"))
        check_flag("training.checkpointing", self.checkpointing)
        check_flag("training.cudnn_benchmark", self.cudnn_benchmark)
        object.__setattr__(self, "optimizer", canonical_call(str(self.optimizer)))
        if self.dry_run_batch_size is None:
            object.__setattr__(self, "dry_run_passes", 1)

    @property
    def without_rate(self) -> "TrainingSetup":
        """The same without the learning rate, on which no byte depends: a sweep over it is one job many times."""
        name, arguments = parse_call(self.optimizer)
        kept = {key: value for key, value in arguments.items() if key != "lr"}
        return replace(self, optimizer=_call_text(name, kept))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch that a step runs with, in the order in which training meets them."""
        found = (self.dry_run_batch_size, self.batch_size, self.last_batch_size)
        return tuple(dict.fromkeys(size for size in found if size is not None))


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


class Status(StrEnum):
    """How a measurement ended. Only OK rows have a peak that the job needed."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    CENSORED = "censored"
    """It ran, but at the card's limit, where the allocator fills what there is: the peak is no need."""


TRIAL = "more than its network takes with other batches: probably a workspace that cuDNN tried and gave back"
"""A note on a measurement."""
EVIDENCE_LENGTH = 500
"""Characters of a measurement's evidence at most."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Peaks of one training run, as far as the backend knows them."""

    status: Status
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    breakdown: Mapping[str, int] = field(default_factory=dict)
    """Bytes by what they hold, at the peak."""
    evidence: str | None = None
    """Why a run that is not OK ended, in a line."""
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know to trust the figures: what was approximated, that a profile is not calibrated."""
    process_bytes: int | None = None
    """NVML's figure for the process: context, libraries and all that is reserved."""
    alone: bool | None = None
    """Whether no other process was on the card, as far as its driver tells; and below what others held at most."""
    others_bytes: int | None = None
    samples: int | None = None
    """How often the card was looked at, and below the longest time that it was not."""
    longest_gap_ms: float | None = None
    cap_bytes: int | None = None
    """An estimate under which the run was repeated as the limit of its allocator, and below whether it ran."""
    cap_held: bool | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The widest peak that is known: device, else reserved, else allocated."""
        for peak in (self.device_used_bytes, self.reserved_bytes, self.allocated_bytes):
            if peak is not None:
                return peak
        return None


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
