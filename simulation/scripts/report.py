"""What a run of a script came to, in a form that goes through a pipe."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from vramcast.simulation.result import Curve, RankPeaks, Simulation
from vramcast.simulation.sandbox.file_protection.changes import Changes
from vramcast.simulation.scripts.report_html import report_html
from vramcast.virtual_gpu.distributed.parallelism import RankGroup


@dataclass(frozen=True)
class PhasePeak:
    """The peaks of one phase of a run."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    count: int | None = None
    """How often it was seen: optimizer steps, or calls of a network; None where that means nothing."""


@dataclass(frozen=True)
class StepPeak:
    """The peaks of one optimizer step, with the shapes of the batch that it began with."""

    allocated_bytes: int
    reserved_bytes: int
    phase: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LineCost:
    """A line of the user's code, and what it holds when the memory peaks."""

    place: str
    held_bytes: int


@dataclass(frozen=True)
class RunReport:
    """A script on a virtual GPU."""

    simulation: Simulation | None
    """None where the script never trained anything on the device."""
    ending: str
    """Why the run stopped, in words."""
    failure: str | None
    """The error that ended the script, with its place, None where none did."""
    traceback: str
    internal: bool
    """The error was raised in code of vramcast, so that the script is not to blame."""
    ran_out_of_memory: bool
    """The script died of torch.OutOfMemoryError."""
    phases: tuple[PhasePeak, ...]
    steps: tuple[StepPeak, ...]
    lines: tuple[LineCost, ...]
    assumptions: tuple[str, ...]
    survived_ooms: int
    """Allocations that failed and that the script handled."""
    expandable_reserved_bytes: int | None
    """The reserved peak with expandable segments."""
    world_size: int
    rank_groups: tuple[RankGroup, ...]
    """Ranks that may differ from this one, and this one; empty for a script on one GPU."""
    operators: int
    seconds: float
    timed_out: bool
    """The time limit ended the script."""
    overlay_refused: bool
    """The script failed at a write that the overlay over the files cannot take."""
    curve: Curve | None
    missing: tuple[str, ...] = ()
    """Phases of the script that were not reached, each with a place."""
    forwarded_after: int | None = None
    """The optimizer steps after which loops of the script ended early; None where none did."""
    has_trained: bool = True
    """False for a script that only evaluates or generates."""
    has_stopped: bool = False
    """The run ended before the script."""
    unwritten: tuple[str, ...] = ()
    """Checkpoints that were kept in memory, where files are not protected."""
    changes: Changes = Changes("none")  # noqa: RUF009 - immutable
    """Of files, in the script's view."""
    devices: tuple[RankPeaks, ...] = ()
    """The peaks of each device that one process used, by ordinal; empty for a process with one."""
    reserved_by_order: tuple[int | None, ...] = ()
    """The reserved peak with each order of batches that was asked for; None where it runs out of memory."""

    @property
    def first_step(self) -> StepPeak | None:
        """Return the first optimizer step."""
        return self.steps[0] if self.steps else None

    @property
    def steady_step(self) -> StepPeak | None:
        """Return the largest step after the first."""
        return max(self.steps[1:], key=lambda item: item.allocated_bytes, default=None)

    def _repr_html_(self) -> str:
        """Return the report for notebooks."""
        return report_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads back."""
        values = {name: value for name, value in vars(self).items() if name not in ("simulation", "curve")}
        for name in ("phases", "steps", "lines", "rank_groups", "devices"):
            values[name] = [asdict(item) for item in values[name]]
        values["simulation"] = self.simulation.to_json() if self.simulation else None
        values["changes"] = self.changes.to_json()
        values["curve"] = vars(self.curve) if self.curve else None
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a report as `to_json` wrote it."""
        read = dict(values)
        read["simulation"] = Simulation.from_json(read["simulation"]) if read["simulation"] else None
        read["curve"] = Curve(**read["curve"]) if read["curve"] else None
        read["changes"] = Changes.from_json(read["changes"])
        read["phases"] = tuple(PhasePeak(**item) for item in read["phases"])
        read["lines"] = tuple(LineCost(**item) for item in read["lines"])
        read["devices"] = tuple(RankPeaks(**item) for item in read["devices"])
        read["rank_groups"] = tuple(RankGroup(**item) for item in read["rank_groups"])
        read["steps"] = tuple(
            StepPeak(**{**item, "shapes": tuple(tuple(shape) for shape in item["shapes"])}) for item in read["steps"]
        )
        for name in ("assumptions", "unwritten", "reserved_by_order", "missing"):
            read[name] = tuple(read[name])
        return cls(**read)
