"""The table of the Gantt chart: which job was on which GPU, and when."""

from collections.abc import Sequence
from dataclasses import dataclass

from vramcast.collocation.cluster_simulation.cluster import AttemptRecord


@dataclass(frozen=True)
class GanttBar:
    """An attempt on one of its GPUs."""

    gpu: int
    lane: int
    """Overlapping attempts on a GPU are in different lanes."""
    start_s: float
    end_s: float
    job: str
    peak_bytes: int
    crashed: bool
    exclusive: bool


def gantt_table(runs: Sequence[AttemptRecord]) -> list[GanttBar]:
    """Return all bars by GPU and time; each attempt is in the lowest free lane."""
    ends_s: dict[int, list[float]] = {}
    bars = []
    for run in sorted(runs, key=lambda run: (run.start_s, run.submission.number)):
        job = run.submission.job
        for gpu in run.gpus:
            lane = _lane(ends_s.setdefault(gpu, []), run)
            bars.append(
                GanttBar(gpu, lane, run.start_s, run.end_s, job.name, job.peak_bytes, run.crashed, run.exclusive)
            )
    return sorted(bars, key=lambda bar: (bar.gpu, bar.start_s, bar.lane))


def _lane(ends_s: list[float], run: AttemptRecord) -> int:
    """Return a lane whose last attempt has ended, or a new one."""
    for lane, end_s in enumerate(ends_s):
        if end_s <= run.start_s:
            ends_s[lane] = run.end_s
            return lane
    ends_s.append(run.end_s)
    return len(ends_s) - 1
