"""Responses as types: the response half of the OpenAPI document. The bytes are made without them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

Basis = Literal["forecast", "observed"]


class Reply(BaseModel):
    """A response without further keys."""

    model_config = ConfigDict(extra="forbid")


class Problem(Reply):
    """An error in one sentence: what was expected, what was found, and how to fix it."""

    status: Literal["error"]
    error: str
    where: str | None = None
    """The part of the request with the error."""


class BucketReply(Reply):
    """A bucket of memory; `upper_mib` is null for the bucket of jobs that do not fit."""

    index: int
    lower_mib: float
    upper_mib: float | None
    probability: float


class ObservedReply(Reply):
    """The observations of a job on a device."""

    runs: int
    peak_mib: float
    """The highest."""


class AnswerReply(Reply):
    """How much memory of a device a job will use, and whether it fits: simulated and learned, never measured.

    Only `observed` was measured, by clients; if it is present, the need comes from it.
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
    """On request: the buckets with a probability of at least 0.05 %."""
    need_mib: float
    """The memory to reserve."""
    basis: Basis
    """The source of the need: the safe answer, or the highest observed peak and a margin."""
    observed: ObservedReply | None
    parallel: str | None = None
    """The strategy for several GPUs; the figures are those of the largest rank."""
    ranks: list[dict[str, Any]] | None = None
    strategies: list[dict[str, Any]] | None = None
    """Other strategies for the same GPUs, on request."""


class AnswersReply(Reply):
    """One answer or problem for each job, in order."""

    answers: list[Annotated[AnswerReply | Problem, Field(discriminator="status")]]


class ObservationReply(Reply):
    """The history of the observed job."""

    status: Literal["ok"]
    device: str
    runs: int
    peak_mib: float | None
    """The highest; null without observations."""


class ObservationsReply(Reply):
    """One reply or problem for each observation, in order."""

    answers: list[Annotated[ObservationReply | Problem, Field(discriminator="status")]]


class PlacementReply(Reply):
    """A GPU that the job fits on."""

    gpu: str
    node: str | None
    need_mib: float
    left_mib: float
    basis: Basis


class RefusalReply(Reply):
    """A GPU that the job does not fit on; `for_good` if the GPU itself is too small."""

    gpu: str
    node: str | None
    reason: str
    for_good: bool


class PlacementsReply(Reply):
    """The GPUs that the job fits on, the choice of the policy first, and the others."""

    policy: str
    placements: list[PlacementReply]
    refused: list[RefusalReply]
    answers: dict[str, AnswerReply]
    """By device profile; none if a job that ran on all of them could not be forecast."""


class CheckpointReply(Reply):
    """The estimator in use, and the state of its files."""

    name: str
    content: str
    """A hash over everything that was learned."""
    loaded_at: str
    on_disk: Literal["same", "changed", "damaged", "missing"]
    note: str | None
    metrics: dict[str, Any]


class CheckpointsReply(Reply):
    """The estimator in use, and the released ones."""

    in_use: CheckpointReply
    released: list[str]


class DeviceReply(Reply):
    """A device profile."""

    name: str
    title: str
    total_mib: int
    available_mib: int
    """The memory that the driver leaves for all jobs."""
    calibrated: bool


class DevicesReply(Reply):
    """All device profiles."""

    default: str
    devices: list[DeviceReply]


class BriefReply(Reply):
    """The figures of an answer."""

    device: str
    profile: str
    batch_size: int
    estimate_mib: float
    safe_mib: float
    capacity_mib: float
    verdict: Literal["fits", "tight", "does not fit"]
    need_mib: float | None = None
    basis: Basis | None = None


class ChangeReply(BriefReply):
    """A change of a job, in words and as options of the command line, with the answer for it."""

    change: str


class AdviceReply(Reply):
    """Advice about a job."""

    status: Literal["ok"]
    target: str
    device: str
    devices: list[BriefReply]
    """The answers on all devices, the smallest device first."""
    max_batch_size: int | None
    """The largest batch that fits; null for several GPUs, 0 if none fits."""
    changes: list[ChangeReply]
    """Changes that reduce the memory of a job that does not fit safely, those that make it fit first."""
    strategies: list[dict[str, Any]]
    """Of a job on several GPUs: other strategies, and the least number of GPUs that fits."""
    notes: list[str] = []


class TimelineReply(Reply):
    """Memory after some hundred events of a run."""

    status: Literal["ok"]
    device: str
    title: str
    uses: dict[str, list[int]]
    """Bytes by use, in the order in which they are stacked above the context."""
    reserved_bytes: list[int]
    context_bytes: int
    capacity_bytes: int


class SolutionReply(Reply):
    """The value that was found; null if no value fits."""

    status: Literal["ok"]
    find: str
    value: int | str | None
    price_per_hour: float | None
    """Of all GPUs, by the operator's prices."""
    answer: dict[str, Any] | None
    notes: list[str]


class QueueReply(Reply):
    """Work of this process that waits or runs."""

    traces: int
    searches: int
    bodies: int
    requests: int


class RunReply(Reply):
    """A run that a client reported, and the forecast of its job if there was one."""

    at: str
    target: str
    device: str
    user: str | None
    peak_mib: float
    estimate_mib: float | None
    safe_mib: float | None


class GroupReply(Reply):
    """Runs of one user or network."""

    name: str
    runs: int
    too_low: int
    """Runs that took more than the forecast reserved."""
    peak_mib: float
    used_share: float | None
    """The median share of the reserved memory that was used."""


class OperationsReply(Reply):
    """The state of this process, and the latest runs since it started."""

    status: str
    queue: QueueReply
    observed_jobs: int
    since: str
    runs: list[RunReply]
    forecast_runs: int
    too_low: int
    users: list[GroupReply]
    networks: list[GroupReply]


class NetworksReply(Reply):
    """The networks that a job can name as its target, and the names that the operator prepared."""

    targets: dict[str, list[str]]
    """By library; a library that is not installed has none."""
    names: list[str]


class HealthReply(Reply):
    """The process is alive."""

    status: Literal["ok"]


class ReadyReply(Reply):
    """The state of the service and of its checkpoint."""

    status: Literal["ready", "degraded", "starting"]
    checkpoint: CheckpointReply | None
    notes: list[str]


def problem_bytes(sentence: str, where: str | None = None) -> bytes:
    """Return a problem as JSON."""
    return to_json({"status": "error", "error": sentence, "where": where})
