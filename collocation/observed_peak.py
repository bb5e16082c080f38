"""The observed memory of a job that ran before. Standard library alone: the service and the simulator share it."""

import math
from dataclasses import dataclass

REPEAT_MARGIN = 0.05
"""The margin on the highest observed peak of a job, as a share: how much the same job differs from run to run.

Two campaigns on one kind of GPU (the columns of 2025 and 2026 in the public table of real networks) differ by at most
2.3 % in 18 jobs; this is twice that.
"""


@dataclass(frozen=True, slots=True)
class ObservedPeak:
    """The number of runs of a job on a device, and the highest peak."""

    runs: int
    peak_bytes: int

    def joined(self, other: "ObservedPeak | None") -> "ObservedPeak":
        """Return the runs of both."""
        if other is None:
            return self
        return ObservedPeak(self.runs + other.runs, max(self.peak_bytes, other.peak_bytes))


def reservation_bytes(peak_bytes: int) -> int:
    """Return the reservation for a job with a highest observed peak."""
    return peak_bytes + math.ceil(REPEAT_MARGIN * peak_bytes)
