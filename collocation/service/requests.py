"""The bodies of requests as types: validated by pydantic, and the request half of the OpenAPI document."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, create_model, model_validator

from vramcast.collocation.placement import POLICIES
from vramcast.defaults import BUCKET_MIB
from vramcast.jobs.job_request import NAMED_KEYS, TRAINING_OPTIONS
from vramcast.jobs.spec import NETWORK_INPUT
from vramcast.models.advice.unknowns import UNKNOWNS
from vramcast.virtual_gpu.distributed.parallelism import PARALLEL_OPTIONS
from vramcast.virtual_gpu.training.setup import LOSSES, OPTIONS, Option, TrainingSetup

Made = TypeVar("Made")
_LARGEST = 2**40
"""Above any count or size in a network, and low enough that products of a few are fast to compute."""

Count = Annotated[int, Field(ge=1, le=_LARGEST)]
Amount = Annotated[int, Field(ge=0, le=_LARGEST)]
Bytes = Annotated[int, Field(ge=0, le=2**50)]
Mib = Annotated[float, Field(ge=0, le=2**30, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=100)]
Shape = Annotated[list[Amount], Field(max_length=8)]
Notes = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=64)]
Factor = int | float | str | bool | None | list[list[Count]]


class StrictBody(BaseModel):
    """A body without unknown keys and without numbers in quotes."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _kind(option: Option) -> Any:
    """Return the type of a training option."""
    kind: Any = {"flag": bool, "text": Text, "form": bool | Text}.get(option.kind)
    if option.kind == "count":
        kind = Annotated[int, Field(ge=option.least, le=option.most)]
    elif option.kind == "fraction":
        kind = Annotated[float, Field(ge=0, le=1)]
    elif option.kind == "choice":
        kind = Literal[tuple(name for name in option.accepted if name != "own")]
    return kind


def _training_fields(**more: Any) -> dict[str, Any]:
    """Return the fields of a request's training, as `TrainingSetup` defines its options; `more` replaces some."""
    kinds: dict[str, Any] = {}
    for item in fields(TrainingSetup):
        option = OPTIONS[item.name]
        kind = _kind(option)
        default = ... if item.default is MISSING else item.default
        kinds[item.name] = (kind | None if default is None else kind, Field(default, description=option.help))
    return {**kinds, **more}


_DEGREE = Annotated[int, Field(ge=1, le=4096)]
_NAMED_KINDS: dict[str, Any] = {
    "target": Annotated[str, Field(min_length=1, max_length=200)],
    "input": Text | Annotated[list[Text], Field(max_length=1)],
    "length": Annotated[int, Field(ge=1, le=2**20)],
    "lora": bool | Annotated[str, Field(max_length=400)],
    **dict.fromkeys(("packed", "keep_output", "max_batch", "strategies", "offload"), bool),
    **dict.fromkeys(("world_size", "nodes", "tensor", "pipeline", "microbatches"), _DEGREE),
    "shard_after_forward": bool | _DEGREE,
}


def _named_fields() -> dict[str, Any]:
    """Return the fields of a job by its name: the keys of a line of `vramcast classify --jobs` that name no file."""
    kinds: dict[str, Any] = {}
    for name in NAMED_KEYS:
        if name in JobOptions.model_fields:
            continue
        option = TRAINING_OPTIONS.get(name)
        kind = _kind(option) if option else _NAMED_KINDS.get(name, Text)
        required = name in ("target", "batch_size")
        text = option.help if option else PARALLEL_OPTIONS.get(name)
        kinds[name] = (kind if required else kind | None, Field(... if required else None, description=text))
    return kinds


class TrainingBody(create_model("TrainingOptions", __base__=StrictBody, **_training_fields())):  # type: ignore[misc]
    """How a network is trained; options that are left out have their default."""


class SpecBody(StrictBody):
    """A network of a generated family. Code is never accepted."""

    family: Literal["mlp", "cnn", "transformer", "template"]
    network: Annotated[dict[Text, Factor], Field(max_length=32)]
    """The factors of the family: see `vramcast build --help`."""
    training: TrainingBody


class LayerBody(StrictBody):
    """A layer of a table, with the elements of one sample."""

    name: Text = ""
    kind: Annotated[str, Field(min_length=1, max_length=100)]
    output_shape: Shape
    activations: Amount
    parameters: Amount
    functional: bool = False
    inputs: Annotated[list[Annotated[int, Field(ge=NETWORK_INPUT)]], Field(max_length=3000)] | None = None
    """Places of earlier layers, or -1 for the network's input; this and the rest are left out if unknown."""
    trainable: Amount | None = None
    parameter_bytes: Amount | None = None
    dtype: Text | None = None
    kernel: Shape | None = None
    stride: Shape | None = None
    groups: Amount | None = None
    saved: Amount | None = None
    saved_fixed_bytes: Amount | None = None


class TableBody(StrictBody):
    """The layers of a network in the order of their execution."""

    layers: Annotated[list[LayerBody], Field(min_length=1, max_length=3000)]
    trainable_shapes: Annotated[list[Shape], Field(max_length=30_000)]
    """Shapes of the parameters with gradients."""
    input_elements: Count

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        for place, layer in enumerate(self.layers):
            if layer.inputs and max(layer.inputs) >= place:
                raise ValueError(f"expected inputs of layer {place} that are earlier layers, found {layer.inputs}")
        return self


class SimulatedBody(StrictBody):
    """The simulation of a job on that device, made elsewhere."""

    fits: bool
    requested_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    workspace_bytes: Bytes


class FeaturesBody(StrictBody):
    """The input of an estimator, computed where the code of the network may run."""

    table: TableBody
    training: TrainingBody
    simulated: SimulatedBody
    family: Text | None = None


class ExportTraining(
    create_model("ExportTrainingOptions", __base__=StrictBody, **_training_fields(loss=(Literal[LOSSES], LOSSES[0])))  # type: ignore[misc]
):
    """How a network was trained where its code is; it may have a loss of its own."""


class MeasurementBody(StrictBody):
    """The peaks of a simulated run."""

    status: Literal["ok", "oom"]
    requested_bytes: Bytes | None = None
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes
    device_used_bytes: Bytes | None = None
    trial_bytes: Bytes | None = None
    tried_bytes: Bytes | None = None
    breakdown: Annotated[dict[Text, Bytes], Field(max_length=32)] = {}
    notes: Notes = []


class PeaksBody(StrictBody):
    """The peaks on a device, and without its limit where they differ."""

    bounded: MeasurementBody
    unbounded: MeasurementBody | None = None


class ExportBody(StrictBody):
    """A job as `vramcast classify --export` and `vramcast run --export` write it."""

    vramcast_job: Literal[1]
    version: Text = ""
    target: Annotated[str, Field(min_length=1, max_length=400)]
    training: ExportTraining
    family: Text | None = None
    table: TableBody
    peaks: Annotated[dict[Text, PeaksBody], Field(min_length=1, max_length=64)]
    """By device."""
    notes: Notes = []
    code: Annotated[dict[str, Text], Field(max_length=1000)] = {}
    """SHA-256 of the files of the code, which clients compare; the service has no files."""


class JobOptions(StrictBody):
    """The options of every job."""

    device: Text | None = None
    """A device profile: see /v1/devices. Default: the service's."""
    risk: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    """The share of jobs that may need more than the safe answer. Default: the service's."""
    bucket_mib: Annotated[int, Field(ge=64, le=65536)] = BUCKET_MIB
    distribution: bool = False
    """Return the probability of each bucket."""
    _made: Any = PrivateAttr(default=None)

    def once(self, make: Callable[[], Made]) -> Made:
        """Return the spec or the named job of a request, which is made at the first call."""
        if self._made is None:
            self._made = make()
        made: Made = self._made
        return made


class SpecJobBody(JobOptions):
    """A job as a spec."""

    spec: SpecBody
    max_batch_size: bool = False
    """Search for the largest batch that fits, which takes several traces."""


class NamedJobBody(JobOptions):
    """A job as a name: 'gpumemnet:' and a file name of the public sets, or a name that the operator prepared."""

    name: Annotated[str, Field(min_length=1, max_length=400)]


class TargetJobBody(create_model("TargetOptions", __base__=JobOptions, **_named_fields())):  # type: ignore[misc]
    """A network of a library by its name, as in timm:resnet50 or hf:gpt2, with the options of `vramcast classify`."""

    fast: bool = False
    """Answer from the layers alone, by the learned estimator for tables: nothing is simulated."""

    @property
    def values(self) -> dict[str, Any]:
        """The job without the options that every job has."""
        return {
            name: value
            for name, value in self.model_dump(exclude_unset=True).items()
            if value is not None and name not in ("fast", *JobOptions.model_fields)
        }


class TableJobBody(JobOptions):
    """A job as a layer table."""

    table: TableBody
    training: TrainingBody


class FileJobBody(JobOptions):
    """A job as the content of a file without code: ONNX, the graph of torch.export, Keras' JSON, safetensors, ..."""

    file: Annotated[str, Field(min_length=1)]
    encoding: Literal["text", "base64"] = "text"
    input: Annotated[list[Text], Field(max_length=16)] = []
    """Shapes without the batch, where the file leaves sizes open."""
    training: TrainingBody
    _network: Any = PrivateAttr(default=None)

    @property
    def network(self) -> Any:
        """The network in the file, None until it is read."""
        return self._network

    @network.setter
    def network(self, network: Any) -> None:
        self._network = network


class FeaturesJobBody(JobOptions):
    """A job as features that were computed elsewhere."""

    features: FeaturesBody


class ExportJobBody(JobOptions):
    """A job that was simulated where its code is."""

    export: ExportBody


def _kind_of(value: Any) -> str:
    """Return the form of a job; without any, the spec is missing."""
    for kind in ("jobs", "target", "name", "file", "table", "features", "export"):
        if (isinstance(value, dict) and kind in value) or (isinstance(value, BaseModel) and hasattr(value, kind)):
            return kind
    return "spec"


_One = (
    Annotated[SpecJobBody, Tag("spec")]
    | Annotated[TargetJobBody, Tag("target")]
    | Annotated[NamedJobBody, Tag("name")]
    | Annotated[FileJobBody, Tag("file")]
    | Annotated[TableJobBody, Tag("table")]
    | Annotated[FeaturesJobBody, Tag("features")]
    | Annotated[ExportJobBody, Tag("export")]
)
JobBody = Annotated[_One, Discriminator(_kind_of)]
AnyJobBody = SpecJobBody | TargetJobBody | NamedJobBody | FileJobBody | TableJobBody | FeaturesJobBody | ExportJobBody


class JobsBody(StrictBody):
    """Several jobs."""

    jobs: Annotated[list[JobBody], Field(min_length=1, max_length=64)]


ClassifyBody = Annotated[_One | Annotated[JobsBody, Tag("jobs")], Discriminator(_kind_of)]


class _JobOnDevice(StrictBody):
    job: JobBody
    device: Text | None = None
    """The device profile that it ran on. Default: the job's, or the service's."""


class ObservationBody(_JobOnDevice):
    """The observed peak of a job."""

    peak_mib: Annotated[float, Field(gt=0, le=2**30)]
    """Memory of the whole process on one GPU, as nvidia-smi shows it: the highest of a run that did not end early."""
    user: Text | None = None
    """Shown to operators; not written to the history."""


class ForgetBody(_JobOnDevice):
    """Removes all observations of a job."""

    forget: Literal[True]


def _observation_kind(value: Any) -> str:
    """Return the form of an observation; without any, the peak is missing."""
    for kind in ("observations", "forget"):
        if (isinstance(value, dict) and kind in value) or (isinstance(value, BaseModel) and hasattr(value, kind)):
            return kind
    return "peak"


_OneObservation = Annotated[ObservationBody, Tag("peak")] | Annotated[ForgetBody, Tag("forget")]


class ObservationListBody(StrictBody):
    """Several observations."""

    observations: Annotated[
        list[Annotated[_OneObservation, Discriminator(_observation_kind)]], Field(min_length=1, max_length=64)
    ]


ObservationsBody = Annotated[
    _OneObservation | Annotated[ObservationListBody, Tag("observations")], Discriminator(_observation_kind)
]


class AdviceBody(StrictBody):
    """A job to be advised on."""

    job: JobBody


class SolveBody(StrictBody):
    """A job with one value left open."""

    job: JobBody
    find: Literal[UNKNOWNS]  # type: ignore[valid-type]
    """The value to find; the job's own is where the search starts."""


class GpuBody(StrictBody):
    """A GPU as a scheduler sees it."""

    id: Annotated[str, Field(min_length=1, max_length=100)]
    free_mib: Mib
    total_mib: Mib | None = None
    """Default: the memory of its device profile."""
    device: Text | None = None
    node: Text | None = None
    jobs: Annotated[int, Field(ge=0, le=10_000)] = 0


class PlacementBody(StrictBody):
    """A job and the GPUs that it could go to."""

    job: JobBody
    gpus: Annotated[list[GpuBody], Field(min_length=1, max_length=4096)]
    policy: Literal[POLICIES] = "best-fit"  # type: ignore[valid-type]
    margin_mib: Mib = 0.0
    """Memory that must stay free beside the need of the job."""
