"""What an estimator may know of a job, and what it is to say: one form for rows, modules and layer tables."""

from dataclasses import dataclass, replace

from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.schema import LayerRecord, StaticEstimate
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training_setup import TrainingSetup

_FIRST_LAYERS = 3
"""Convolutions that a Transformer may begin with."""
_MEASURED_LIBRARIES = ("timm",)
"""Of whose networks rows were measured; what they say of others' is less sure."""
_REAL_ELSEWHERE = "real elsewhere"


def is_convolution(kind: str) -> bool:
    """Whether a layer is a convolution, of torch or of a library that derives its own; transformers' Conv1D is none."""
    return "conv" in kind.lower() and kind != "Conv1D"


@dataclass(frozen=True)
class Simulated:
    """What the virtual GPU says of the job, without what the device holds beside it."""

    fits: bool
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    """Where it does not fit, what it had taken when the card was full."""
    workspace_bytes: int
    """cuDNN's part at the peak: the least certain one."""


def simulated_of(measurement: Measurement) -> Simulated:
    """What the virtual GPU measured, as an estimator sees it."""
    found = measurement
    if found.requested_bytes is None or found.allocated_bytes is None or found.reserved_bytes is None:
        raise TypeError(f"a simulation knows its peaks, found {found}")
    return Simulated(
        fits=found.status is Status.OK,
        requested_bytes=found.requested_bytes,
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        workspace_bytes=found.breakdown["workspace"],
    )


@dataclass(frozen=True)
class Target:
    """What was measured."""

    used_bytes: int
    """On the device; for a job that did not fit, where it died."""
    fits: bool
    trial: bool = False
    """Whether it holds a workspace that cuDNN tried and gave back, as jobs without cudnn.benchmark never do."""


@dataclass(frozen=True)
class Example:
    """One job: all that features are computed from. Estimators see nothing else."""

    id: str
    group: str
    """Examples of one group never part when data is split."""
    design: str
    """Of a library's network, what its sisters share: a bound must hold for designs that nobody measured."""
    family: str
    training: TrainingSetup
    layers: tuple[LayerRecord, ...]
    input_elements: int
    """Of one sample."""
    static: StaticEstimate
    simulated: Simulated | None
    """None where only a layer table is known."""
    overhead_bytes: int
    """What the device holds beside the job's allocator: context, libraries, other processes."""
    capacity_bytes: int
    """What all jobs and overheads of the device may sum up to before it is full."""
    source: str
    """The stack that the target was measured on, a device profile's name."""
    target: Target | None = None
    """None where nothing was measured: a job to be classified."""
    backend: str | None = None
    """What the target comes from: virtual, cuda, or nvidia-smi for tables of others."""

    @property
    def stratum(self) -> str:
        """What safe margins are kept by: a family of generated networks; of real ones, what cuDNN may do with them."""
        if self.family in FAMILIES:
            return self.family
        if not self._has_workspaces:
            return "real" if self.family in _MEASURED_LIBRARIES else _REAL_ELSEWHERE
        return "real with trials" if self.training.cudnn_benchmark else "real with workspaces"

    @property
    def calibrates(self) -> tuple[str, ...]:
        """The strata of which a measured example tells something: its own, those without trials, other libraries."""
        if self.measured.trial or self.family in FAMILIES:
            return (self.stratum,)
        alike = replace(self, training=replace(self.training, cudnn_benchmark=False)).stratum
        return tuple(dict.fromkeys((self.stratum, alike, _REAL_ELSEWHERE)))

    @property
    def _has_workspaces(self) -> bool:
        """Whether it is a convolutional network: a first layer that cuts an image into patches makes none."""
        return sum(is_convolution(layer.kind) for layer in self.layers) > _FIRST_LAYERS

    @property
    def simulation(self) -> Simulated:
        """What the virtual GPU says, for those who cannot do without."""
        if self.simulated is None:
            raise UserError(
                f"expected a simulated estimate of {self.id}, found a layer table alone: give the network itself, "
                "or use an estimator with features=gpumemnet"
            )
        return self.simulated

    @property
    def measured(self) -> Target:
        """The target, for those who cannot do without."""
        if self.target is None:
            raise UserError(f"expected measured examples, found {self.id} without a measurement: leave it out")
        return self.target
