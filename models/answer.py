"""What a person or a scheduler is told of one job: one form for the command line, Python, and the service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FITS, TIGHT, TOO_LARGE = "fits", "tight", "does not fit"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The likeliest class. `upper_mib` is None for the last one, which holds all that does not fit."""

    index: int
    lower_mib: float
    upper_mib: float | None
    probability: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How much of a device a job will use, and whether it fits. Figures are simulated and learned, never measured."""

    target: str
    batch_size: int
    device: str
    bucket: Bucket
    estimate_mib: float
    """The point estimate on the device; of a job that does not fit, what it would need on a card without end."""
    safe_mib: float
    """What to set aside so that it is too little at the risk only; above the card where that does not fit."""
    allocated_mib: float | None
    """The peak inside torch's allocator as simulated, and below what it reserves; None for a layer table alone."""
    reserved_mib: float | None
    capacity_mib: float
    """What the device has for all jobs and their overheads."""
    oom_probability: float
    risk: float
    out_of_distribution: bool
    checkpoint: str
    profile: str
    """The device profile, and whether it was calibrated on measurements."""
    seconds: float
    breakdown_mib: Mapping[str, float] = field(default_factory=dict)
    """By what the memory holds at the peak; empty for a layer table alone."""
    max_batch_size: int | None = None
    """The largest batch whose safe answer fits; None where nobody asked, 0 where none does."""
    notes: tuple[str, ...] = ()
    """What was approximated, and what a reader must know to trust the figures."""

    @property
    def fits(self) -> bool:
        """Whether the point estimate is below what the device has."""
        return self.estimate_mib < self.capacity_mib

    @property
    def verdict(self) -> str:
        """'fits' where the safe answer does too, 'tight' where the point estimate alone does, else 'does not fit'."""
        if not self.fits:
            return TOO_LARGE
        return FITS if self.safe_mib <= self.capacity_mib else TIGHT

    def to_json(self) -> dict[str, Any]:
        """All of it by name, with what follows from it."""
        return {
            "status": "ok",
            **vars(self),
            "bucket": dict(vars(self.bucket)),
            "breakdown_mib": dict(self.breakdown_mib),
            "notes": list(self.notes),
            "fits": self.fits,
            "verdict": self.verdict,
        }
