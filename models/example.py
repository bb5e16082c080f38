"""Examples: a row or a job as estimators see it, with features and, where it was measured, a label."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramcast.errors import UserError
from vramcast.jobs.spec import LayerRecord, StaticEstimate
from vramcast.models.layer_columns import LayerColumns
from vramcast.simulation.result import OrderPeaks
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.training.setup import TrainingSetup

if TYPE_CHECKING:  # schedules need the rules of devices, and commands read answers without them
    from vramcast.jobs.analysis.schedule import Schedule, ScheduledPeak

UNBOUNDED_BYTES = 2**50
"""The capacity of a device without a memory limit."""


@dataclass(frozen=True)
class Label:
    """The measured memory of a job."""

    used_bytes: int
    """On the device; for a job that did not fit, its use when it died."""
    fits: bool
    trial: bool = False
    """True if it includes a workspace that cuDNN tried and gave back, as only jobs with cudnn.benchmark do."""
    least_used_bytes: int | None = None
    """The lower end, if the label is a band that ends at `used_bytes`."""
    varying: bool = False
    """True if the lengths of its batches varied and are not known."""
    parts: Mapping[str, int] | None = None
    """Bytes by use at the peak, which a simulation tells and a measurement does not."""


@dataclass(frozen=True)
class Example:
    """One job on one device: everything that features are computed from."""

    id: str
    group: str
    """Examples of one group stay together when data is split."""
    design: str
    """Shared by sister networks of a library: bounds must hold for designs without measurements."""
    family: str
    training: TrainingSetup
    layers: tuple[LayerRecord, ...]
    input_elements: int
    """Of one sample."""
    static: StaticEstimate
    simulated: Measurement | None
    """None where only a layer table is given."""
    overhead_bytes: int
    """Memory of the device outside the job's allocator: context, libraries, other processes."""
    capacity_bytes: int
    """Memory that jobs and overheads can use before the device is full."""
    source: str
    """The stack that the label was measured on, by the name of its device profile."""
    label: Label | None = None
    """None for a job to be classified."""
    backend: str | None = None
    """The origin of the label: virtual, cuda, or nvidia-smi for published tables."""
    time: str = ""
    """When the label was measured, where one device was measured with several software stacks."""
    calibrated: bool = True
    """True if the device profile was fitted to measurements."""
    assumed: bool = False
    """True if the trace assumed values of data, or a kernel that the virtual GPU does not know."""
    compiled: bool = False
    """True if torch.compile compiled a part of the network: which results exist there is a rule."""
    unknown_nccl: bool = False
    """True for a rank on a device whose profile has no measured memory of NCCL."""
    orders: OrderPeaks | None = None
    """The memory with each order of batches, if their lengths vary."""
    schedule: "Schedule | None" = None
    """The training run as its layer table tells it."""

    @property
    def columns(self) -> LayerColumns:
        """The layers with their columns, which examples of one table on several devices share."""
        return LayerColumns.of(self.layers)

    @property
    def is_inference(self) -> bool:
        """True if nothing is trained: no measured job is like it."""
        return not self.training.is_training

    @property
    def is_rank(self) -> bool:
        """True for a rank of a distributed run, described by its training or found in a script."""
        return self.unknown_nccl or self.training.parallel is not None

    @property
    def simulation(self) -> Measurement:
        """The simulated measurement; an error where there is none."""
        if self.simulated is None:
            raise UserError(
                f"expected a simulated estimate of {self.id}, found a layer table alone: give the network itself, "
                "or use an estimator with features=gpumemnet"
            )
        return self.simulated

    @property
    def scheduled(self) -> "ScheduledPeak":
        """The memory that the schedule takes; an error where there is none."""
        if self.schedule is None:
            raise UserError(f"expected the layer table of {self.id}, found none: give it, or use features=gpumemnet")
        return self.schedule.peak

    @property
    def measured(self) -> Label:
        """The label; an error where there is none."""
        if self.label is None:
            raise UserError(f"expected measured examples, found {self.id} without a measurement: leave it out")
        return self.label
