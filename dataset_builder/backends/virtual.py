"""The virtual GPU as a backend."""

import time
from dataclasses import replace

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.job import SpecJob
from vramcast.jobs.spec import Spec
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.tracing.trace import Trace


class VirtualBackend(Backend):
    """Simulates specs on a device profile. With `tables`, results carry the layers of libraries' networks."""

    name = "virtual"
    origin = "simulated"

    def __init__(self, profile: DeviceProfile, options: AllocatorOptions | None = None, tables: bool = False) -> None:
        self.profile = profile
        self.options = options or AllocatorOptions()
        self.tables = tables
        self.device = profile.name

    def measure(self, spec: Spec) -> BackendResult:
        """Trace the training of a spec and replay it on the device."""
        start = time.perf_counter()
        simulator = Simulator(SpecJob(spec), self.options)
        measurement = simulator.measure({}, self.profile)
        table = simulator.table() if self.tables and spec.family not in FAMILIES else None
        return BackendResult(replace(measurement, seconds=round(time.perf_counter() - start, 4)), table=table)


def trace_spec(spec: Spec, compute_capability: float = 8.0) -> Trace:
    """Return the trace of a spec's training on devices of a compute capability."""
    return Simulator(SpecJob(spec)).trace({}, compute_capability)
