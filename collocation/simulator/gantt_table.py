"""Who was on which GPU when: the table behind the Gantt chart."""

from collections.abc import Sequence
from dataclasses import dataclass

from vramcast.collocation.simulator.cluster import AttemptRecord


@dataclass(frozen=True)
class GanttBar:
    """A run on one of its GPUs."""

    gpu: int
    lane: int
    """Runs of a GPU that overlap lie in lanes of their own."""
    start_s: float
    end_s: float
    job: str
    peak_bytes: int
    crashed: bool
    exclusive: bool


def gantt_table(runs: Sequence[AttemptRecord]) -> list[GanttBar]:
    """All bars, GPU by GPU in order of time; each run lies in the lowest lane that is free."""
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
    """Take a lane whose last run is over, or open one."""
    for lane, end_s in enumerate(ends_s):
        if end_s <= run.start_s:
            ends_s[lane] = run.end_s
            return lane
    ends_s.append(run.end_s)
    return len(ends_s) - 1
