"""What may be asked, as types: validated by pydantic, and the request half of the OpenAPI document."""

from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from vramcast.collocation.placement import POLICIES
from vramcast.dataset_builder.defaults import BUCKET_MIB
from vramcast.virtual_gpu.training_setup import OPTIONS, TrainingSetup

_LARGEST = 2**40
"""Above any count or size in a network, and low enough that products of a few stay quick to compute."""

Count = Annotated[int, Field(ge=1, le=_LARGEST)]
Amount = Annotated[int, Field(ge=0, le=_LARGEST)]
Bytes = Annotated[int, Field(ge=0, le=2**50)]
Mib = Annotated[float, Field(ge=0, le=2**30, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=100)]
Shape = Annotated[list[Amount], Field(max_length=8)]
Factor = int | float | str | bool | None | list[list[Count]]


class StrictBody(BaseModel):
    """No unknown keys, and no numbers in quotes: what is not understood is told, not guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _training_fields() -> dict[str, Any]:
    """Return the fields of a request's training, as `TrainingSetup` defines its options."""
    kinds: dict[str, Any] = {}
    for item in fields(TrainingSetup):
        option = OPTIONS[item.name]
        kind: Any = {"flag": bool, "text": Text}.get(option.kind)
        if option.kind == "count":
            kind = Annotated[int, Field(ge=option.least, le=option.most)]
        elif option.kind == "choice":
            kind = Literal[tuple(name for name in option.accepted if name != "own")]
        default = ... if item.default is MISSING else item.default
        kinds[item.name] = (kind | None if default is None else kind, Field(default, description=option.help))
    return kinds


class TrainingBody(create_model("TrainingOptions", __base__=StrictBody, **_training_fields())):  # type: ignore[misc]
    """How a network is trained; options that are left out have their default."""


class SpecBody(StrictBody):
    """A network of a generated family. Code is never taken."""

    family: Literal["mlp", "cnn", "transformer", "template"]
    network: Annotated[dict[Text, Factor], Field(max_length=32)]
    """The factors of the family: see `vramcast build --help`."""
    training: TrainingBody


class LayerBody(StrictBody):
    """A line of a layer table: elements of one sample."""

    name: Text = ""
    kind: Annotated[str, Field(min_length=1, max_length=100)]
    output_shape: Shape
    activations: Amount
    parameters: Amount
    functional: bool = False


class TableBody(StrictBody):
    """The layers of a network in the order in which they run."""

    layers: Annotated[list[LayerBody], Field(min_length=1, max_length=3000)]
    trainable_shapes: Annotated[list[Shape], Field(max_length=30_000)]
    """Of the parameters that have gradients."""
    input_elements: Count


class SimulatedBody(StrictBody):
    """What the virtual GPU said of the job on that device, somewhere else."""

    fits: bool
    requested_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    workspace_bytes: Bytes


class FeaturesBody(StrictBody):
    """All that an estimator looks at, worked out where the network's own code can run."""

    table: TableBody
    training: TrainingBody
    simulated: SimulatedBody
    family: Text | None = None


class JobOptions(StrictBody):
    """What every job may say."""

    device: Text | None = None
    """A device profile: see /v1/devices. Default: the service's."""
    risk: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    """How often the safe answer may be too low. Default: the service's."""
    bucket_mib: Annotated[int, Field(ge=64, le=65536)] = BUCKET_MIB
    distribution: bool = False
    """Whether to tell the probability of each bucket."""


class SpecJobBody(JobOptions):
    """A job as a spec."""

    spec: SpecBody
    max_batch_size: bool = False
    """Whether to look for the largest batch that fits, which takes several traces."""


class NamedJobBody(JobOptions):
    """A job by a name: 'gpumemnet:' and a file name of the public sets, or one that the operator prepared."""

    name: Annotated[str, Field(min_length=1, max_length=400)]


class TableJobBody(JobOptions):
    """A job as a layer table."""

    table: TableBody
    training: TrainingBody


class FeaturesJobBody(JobOptions):
    """A job as features that were computed before."""

    features: FeaturesBody


def _kind_of(value: Any) -> str:
    """Which form a job has; without any of them a spec is missed."""
    for kind in ("jobs", "name", "table", "features"):
        if (isinstance(value, dict) and kind in value) or (isinstance(value, BaseModel) and hasattr(value, kind)):
            return kind
    return "spec"


_One = (
    Annotated[SpecJobBody, Tag("spec")]
    | Annotated[NamedJobBody, Tag("name")]
    | Annotated[TableJobBody, Tag("table")]
    | Annotated[FeaturesJobBody, Tag("features")]
)
JobBody = Annotated[_One, Discriminator(_kind_of)]
AnyJobBody = SpecJobBody | NamedJobBody | TableJobBody | FeaturesJobBody


class JobsBody(StrictBody):
    """Several jobs at once."""

    jobs: Annotated[list[JobBody], Field(min_length=1, max_length=64)]


ClassifyBody = Annotated[_One | Annotated[JobsBody, Tag("jobs")], Discriminator(_kind_of)]


class _Ran(StrictBody):
    job: JobBody
    device: Text | None = None
    """The card that it ran on, as a device profile. Default: the job's, and the service's where that has none."""


class ObservationBody(_Ran):
    """What a job was seen to take."""

    peak_mib: Annotated[float, Field(gt=0, le=2**30)]
    """Of the whole process on one card, as nvidia-smi shows it: the highest of a run that did not end early."""


class ForgetBody(_Ran):
    """That all that is known of a job's runs is wrong."""

    forget: Literal[True]


def _told_of(value: Any) -> str:
    """Whether several are told, or one, or one is taken back; without any of them a peak is missed."""
    for kind in ("observations", "forget"):
        if (isinstance(value, dict) and kind in value) or (isinstance(value, BaseModel) and hasattr(value, kind)):
            return kind
    return "peak"


_Told = Annotated[ObservationBody, Tag("peak")] | Annotated[ForgetBody, Tag("forget")]


class ObservationListBody(StrictBody):
    """Several at once."""

    observations: Annotated[list[Annotated[_Told, Discriminator(_told_of)]], Field(min_length=1, max_length=64)]


ObservationsBody = Annotated[_Told | Annotated[ObservationListBody, Tag("observations")], Discriminator(_told_of)]


class GpuBody(StrictBody):
    """A GPU as the scheduler sees it."""

    id: Annotated[str, Field(min_length=1, max_length=100)]
    free_mib: Mib
    total_mib: Mib | None = None
    """Default: what its device profile has."""
    device: Text | None = None
    node: Text | None = None
    jobs: Annotated[int, Field(ge=0, le=10_000)] = 0


class PlacementBody(StrictBody):
    """A job, and where it could go."""

    job: JobBody
    gpus: Annotated[list[GpuBody], Field(min_length=1, max_length=4096)]
    policy: Literal[POLICIES] = "best-fit"  # type: ignore[valid-type]
    margin_mib: Mib = 0.0
    """What must stay free beside what is set aside for the job."""
