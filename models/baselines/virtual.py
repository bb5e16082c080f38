"""The virtual GPU with nothing learned on top."""

from math import inf

from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.measurement import Status


class Virtual(Formula):
    """What the device holds beside the job, and what the simulated allocator reserved."""

    name = "virtual"

    def used_bytes(self, example: Example) -> float:
        """Overhead and reserved bytes; infinity where the simulation ran out of memory."""
        simulated = example.simulation
        return example.overhead_bytes + (simulated.reserved_bytes or 0) if simulated.status is Status.OK else inf
