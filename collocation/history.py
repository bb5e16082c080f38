"""What to set aside for a job that ran before. Standard library alone: the service and the simulator share it."""

import math

REPEAT_MARGIN = 0.05
"""What the same job differs by from run to run, as a share of the highest peak that was seen."""


def repeated_bytes(peak_bytes: int) -> int:
    """What to set aside where the job's highest peak is known."""
    return peak_bytes + math.ceil(REPEAT_MARGIN * peak_bytes)
