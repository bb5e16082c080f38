"""The virtual GPU as an estimator that learns nothing."""

from math import inf

from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.measurement import Status


class Virtual(Formula):
    """The device's overhead plus the memory that the simulated allocator reserved."""

    name = "virtual"

    @property
    def needs_simulation(self) -> bool:
        """True if examples need a simulated measurement."""
        return True

    def used_bytes(self, example: Example) -> float:
        """Return overhead and reserved bytes; infinity if the simulation ran out of memory."""
        simulated = example.simulation
        return example.overhead_bytes + (simulated.reserved_bytes or 0) if simulated.status is Status.OK else inf
