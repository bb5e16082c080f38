"""The virtual GPU with nothing learned on top."""

from math import inf

from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example


class Virtual(Formula):
    """What the device holds beside the job, and what the simulated allocator reserved."""

    name = "virtual"

    def used_bytes(self, example: Example) -> float:
        """Overhead and reserved bytes; infinity where the simulation ran out of memory."""
        simulated = example.simulation
        return example.overhead_bytes + simulated.reserved_bytes if simulated.fits else inf
