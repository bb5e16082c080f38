"""The peaks of one training run, simulated or measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a measurement ended. Only OK means that the peak is what the job needs."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    CENSORED = "censored"
    """The job ran at the limit of the device, where the allocator fills all memory: the peak is not the need."""


TRIAL = "more than its network takes with other batches: probably a workspace that cuDNN tried and gave back"
"""A note on a measurement."""
VARYING = "the lengths of its batches varied and are not known: the simulated length is the longest"
"""A note on a measurement."""
EVIDENCE_LENGTH = 500
"""Maximal number of characters of a measurement's evidence."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Peaks of one training run; None for those that the backend does not know."""

    status: Status
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    least_used_bytes: int | None = None
    """The lower end, if the measurement is a band that ends at `device_used_bytes`."""
    trial_bytes: int | None = None
    """Reserved memory during the largest trial of cudnn.benchmark, as a monitor may see it; None without trials."""
    tried_bytes: int | None = None
    """The sum of the workspaces of all trials that reserve more than the run itself."""
    breakdown: Mapping[str, int] = field(default_factory=dict)
    """Bytes by use at the peak."""
    evidence: str | None = None
    """The reason why a run that is not OK ended, in one line."""
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    """Caveats of the figures: approximations, and a profile that is not calibrated."""
    process_bytes: int | None = None
    """Memory of the process according to NVML: context, libraries and reserved bytes."""
    alone: bool | None = None
    """True if the driver reported no other process on the device."""
    others_bytes: int | None = None
    """Maximal memory of other processes."""
    samples: int | None = None
    """Number of NVML samples; below, the longest time between two of them."""
    longest_gap_ms: float | None = None
    cap_bytes: int | None = None
    """An estimate that was set as the limit of the allocator in a second run."""
    cap_held: bool | None = None
    """True if that run completed."""

    @property
    def peak_bytes(self) -> int | None:
        """Return the most complete peak: device, else reserved, else allocated."""
        for peak in (self.device_used_bytes, self.reserved_bytes, self.allocated_bytes):
            if peak is not None:
                return peak
        return None
