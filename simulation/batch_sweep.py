"""One spec at several batch sizes: its network with its layers, and the peaks of each size on several devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vramcast.jobs.job import SpecJob, detailed_table_of
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.simulation.replays import Replays
from vramcast.simulation.result import Peaks
from vramcast.simulation.simulator import prepared
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.tracing.batch_sizes import traces_by_size
from vramcast.virtual_gpu.tracing.capability import RecordedCapability
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import Trace
from vramcast.virtual_gpu.training.setup import TrainingSetup


@dataclass(frozen=True)
class SweptSize:
    """A spec with one batch size."""

    spec: Spec
    trace: Trace
    traced: bool
    """False if the trace was computed from those of other sizes."""


class BatchSweep:
    """Traces a spec at several batch sizes, as rarely as they allow, and replays the traces.

    The traces hold for the devices that decide alike in all of them: see `holds_for`.
    """

    def __init__(self, spec: Spec, compute_capability: float, allocator: AllocatorOptions) -> None:
        self.spec = spec
        self.allocator = allocator
        self._capability = RecordedCapability(compute_capability)

    def table(self) -> LayerTable:
        """Return the detailed layer table of the network."""
        return detailed_table_of(self.spec)

    def sizes(self, batch_sizes: Sequence[int]) -> Iterator[SweptSize]:
        """Yield the spec with each batch size and its trace."""
        for size, trace, traced in traces_by_size(self._trace, batch_sizes):
            yield SweptSize(replace(self.spec, training=self._training(size)), trace, traced)

    def holds_for(self, profile: DeviceProfile) -> bool:
        """Return whether all traces so far hold for a device."""
        return self._capability.decides_alike(profile.compute_capability)

    def peaks(self, trace: Trace, profiles: Sequence[DeviceProfile]) -> dict[str, Peaks]:
        """Replay a trace on the devices that it holds for."""
        replays = Replays(self.allocator)
        return {profile.name: replays.peaks(trace, profile) for profile in profiles if self.holds_for(profile)}

    def _training(self, size: int) -> TrainingSetup:
        """Return the training with another batch size, which a dry run of whole batches follows."""
        training = self.spec.training
        whole = training.dry_run_batch_size == training.batch_size
        return replace(training, batch_size=size, dry_run_batch_size=size if whole else training.dry_run_batch_size)

    def _trace(self, size: int) -> Trace:
        job = prepared(SpecJob(self.spec), self._training(size))
        return trace_training(
            job.subject,
            job.make_inputs,
            job.training,
            compute_capability=self._capability,
            make_optimizer=job.make_optimizer,
            postpone_sums=True,
        )
