"""The schedule of a layer table alone: forward, backward and optimizer step, replayed through the allocator."""

from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example


class Scheduled(Formula):
    """The overhead of the device and the memory that the schedule reserves."""

    name = "schedule"

    def used_bytes(self, example: Example) -> float:
        """Return the sum."""
        return example.overhead_bytes + example.scheduled.reserved_bytes
