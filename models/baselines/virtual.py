"""The virtual GPU with nothing learned on top."""

from math import inf

from dataset_builder.errors import UserError
from models.baselines._formula import Formula
from models.example import Example, Simulated


class Virtual(Formula):
    """What the device holds beside the job, and what the simulated allocator reserved."""

    name = "virtual"

    def used_bytes(self, example: Example) -> float:
        """Overhead and reserved bytes; infinity where the simulation ran out of memory."""
        simulated = simulation_of(example)
        return example.overhead_bytes + simulated.reserved_bytes if simulated.fits else inf


def simulation_of(example: Example) -> Simulated:
    """What the virtual GPU says of an example, which has to be there."""
    if example.simulated is None:
        raise UserError(
            f"expected a simulated estimate of {example.id}, found a layer table alone: give the network itself"
        )
    return example.simulated
