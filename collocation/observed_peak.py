"""What is known of a job that ran before. Standard library alone: the service and the simulator share it."""

import math
from dataclasses import dataclass

REPEAT_MARGIN = 0.05
"""What the same job differs by from run to run, as a share of the highest peak that was seen.

Two campaigns on one kind of card (the columns of 2025 and 2026 in the public table of real networks) differ by 2.3 % at
most in 18 jobs; this is twice that.
"""


@dataclass(frozen=True, slots=True)
class ObservedPeak:
    """How often a job was seen on a card, and what it took there at most."""

    runs: int
    peak_bytes: int

    def joined(self, other: "ObservedPeak | None") -> "ObservedPeak":
        """Both together."""
        if other is None:
            return self
        return ObservedPeak(self.runs + other.runs, max(self.peak_bytes, other.peak_bytes))


def reservation_bytes(peak_bytes: int) -> int:
    """What to set aside where the job's highest peak is known."""
    return peak_bytes + math.ceil(REPEAT_MARGIN * peak_bytes)
