"""What is answered, as types: the response half of the OpenAPI document. The bytes are made without them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

Basis = Literal["forecast", "observed"]


class Reply(BaseModel):
    """Nothing else is answered."""

    model_config = ConfigDict(extra="forbid")


class Problem(Reply):
    """What was expected, what was found, how to mend it."""

    status: Literal["error"]
    error: str
    where: str | None = None
    """The part of the request that it is about."""


class BucketReply(Reply):
    """A class of memory; `upper_mib` is null for the one that holds what does not fit."""

    index: int
    lower_mib: float
    upper_mib: float | None
    probability: float


class ObservedReply(Reply):
    """What was seen of a job on a device, as schedulers told it."""

    runs: int
    peak_mib: float
    """The highest."""


class AnswerReply(Reply):
    """How much of a device a job will use, and whether it fits: simulated and learned, never measured.

    Only `observed` was measured, by others; where it is there, what to set aside comes from it.
    """

    status: Literal["ok"]
    target: str
    batch_size: int
    device: str
    bucket: BucketReply
    estimate_mib: float
    safe_mib: float
    allocated_mib: float | None
    reserved_mib: float | None
    capacity_mib: float
    oom_probability: float
    risk: float
    out_of_distribution: bool
    checkpoint: str
    profile: str
    seconds: float
    breakdown_mib: dict[str, float]
    max_batch_size: int | None
    notes: list[str]
    inputs: list[dict[str, Any]]
    """Shape and dtype of each input."""
    traced_with: dict[str, str]
    """Versions of torch and of the network's libraries."""
    fits: bool
    verdict: Literal["fits", "tight", "does not fit"]
    distribution: list[BucketReply] | None = None
    """Where it was asked for: buckets that have a share worth telling."""
    need_mib: float
    """What to set aside."""
    basis: Basis
    """Whether that is the safe answer, or the highest observed peak and a margin."""
    observed: ObservedReply | None


class AnswersReply(Reply):
    """One answer or problem for each job, in their order."""

    answers: list[Annotated[AnswerReply | Problem, Field(discriminator="status")]]


class ObservationReply(Reply):
    """What is now known of the job that was told of."""

    status: Literal["ok"]
    device: str
    runs: int
    peak_mib: float | None
    """The highest; null where all was forgotten."""


class ObservationsReply(Reply):
    """One for each observation, in their order; a problem for those that were not taken."""

    answers: list[Annotated[ObservationReply | Problem, Field(discriminator="status")]]


class PlacementReply(Reply):
    """A GPU that the job fits on."""

    gpu: str
    node: str | None
    need_mib: float
    left_mib: float
    basis: Basis


class RefusalReply(Reply):
    """A GPU that the job does not fit on; `for_good` where the card itself is too small."""

    gpu: str
    node: str | None
    reason: str
    for_good: bool


class PlacementsReply(Reply):
    """Where the job fits, the policy's choice first, and where it does not."""

    policy: str
    placements: list[PlacementReply]
    refused: list[RefusalReply]
    answers: dict[str, AnswerReply]
    """By device profile; none where a job that ran on all of them could not be forecast."""


class CheckpointReply(Reply):
    """An estimator: the one in use, and whether its files are still what was loaded."""

    name: str
    content: str
    """A hash over all that was learned."""
    loaded_at: str
    on_disk: Literal["same", "changed", "damaged", "missing"]
    note: str | None
    metrics: dict[str, Any]


class CheckpointsReply(Reply):
    """All that can be told of estimators here."""

    in_use: CheckpointReply
    released: list[str]


class DeviceReply(Reply):
    """A device profile."""

    name: str
    title: str
    total_mib: int
    available_mib: int
    """What the driver leaves for all jobs."""
    calibrated: bool


class DevicesReply(Reply):
    """All device profiles."""

    default: str
    devices: list[DeviceReply]


class HealthReply(Reply):
    """Alive."""

    status: Literal["ok"]


class ReadyReply(Reply):
    """Whether requests are answered, and whether the checkpoint could be loaded again."""

    status: Literal["ready", "degraded", "starting"]
    checkpoint: CheckpointReply | None
    notes: list[str]


def problem_bytes(sentence: str, where: str | None = None) -> bytes:
    """A problem as JSON."""
    return to_json({"status": "error", "error": sentence, "where": where})
