"""The peaks of one training run, simulated or measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a measurement ended. Only OK rows have a peak that the job needed."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    CENSORED = "censored"
    """It ran, but at the card's limit, where the allocator fills what there is: the peak is no need."""


TRIAL = "more than its network takes with other batches: probably a workspace that cuDNN tried and gave back"
"""A note on a measurement."""
EVIDENCE_LENGTH = 500
"""Characters of a measurement's evidence at most."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Peaks of one training run, as far as the backend knows them."""

    status: Status
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    breakdown: Mapping[str, int] = field(default_factory=dict)
    """Bytes by what they hold, at the peak."""
    evidence: str | None = None
    """Why a run that is not OK ended, in a line."""
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know to trust the figures: what was approximated, that a profile is not calibrated."""
    process_bytes: int | None = None
    """NVML's figure for the process: context, libraries and all that is reserved."""
    alone: bool | None = None
    """Whether no other process was on the card, as far as its driver tells; and below what others held at most."""
    others_bytes: int | None = None
    samples: int | None = None
    """How often the card was looked at, and below the longest time that it was not."""
    longest_gap_ms: float | None = None
    cap_bytes: int | None = None
    """An estimate under which the run was repeated as the limit of its allocator, and below whether it ran."""
    cap_held: bool | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The widest peak that is known: device, else reserved, else allocated."""
        for peak in (self.device_used_bytes, self.reserved_bytes, self.allocated_bytes):
            if peak is not None:
                return peak
        return None
