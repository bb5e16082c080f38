"""The metrics of a simulation, computed from its attempts alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramcast.collocation.cluster_simulation.cluster import AttemptRecord
from vramcast.collocation.cluster_simulation.rules import ClusterRules


@dataclass(frozen=True, kw_only=True)
class ClusterMetrics:
    """Times in seconds; utilisation as a share of all GPUs over the makespan."""

    jobs: int
    makespan_s: float
    """From the first arrival to the last end."""
    mean_jct_s: float
    """Job completion time: from arrival to the end of the attempt that succeeded."""
    p95_jct_s: float
    mean_wait_s: float
    """The time in which no attempt of a job ran."""
    ooms: float
    """Attempts that ran out of memory; not an integer for a mean of several simulations."""
    wasted_gpu_s: float
    """GPU time of those attempts."""
    memory_utilisation: float
    """Memory that jobs used."""
    gpu_utilisation: float
    """Time in which a GPU had a job."""

    def to_json(self) -> dict[str, float]:
        """Return all metrics by name."""
        return dict(vars(self))


def cluster_metrics(runs: Sequence[AttemptRecord], rules: ClusterRules) -> ClusterMetrics:
    """Return the metrics of a simulation."""
    start_s = min(run.submission.arrival_s for run in runs)
    makespan_s = max(run.end_s for run in runs) - start_s
    finished = [run for run in runs if not run.crashed]
    completion_s = {run.submission.number: run.end_s - run.submission.arrival_s for run in finished}
    running_s: dict[int, float] = defaultdict(float)
    for run in runs:
        running_s[run.submission.number] += run.end_s - run.start_s
    waits_s = [completion_s[number] - running_s[number] for number in completion_s]
    crashed = [run for run in runs if run.crashed]
    times_s = np.array(list(completion_s.values()))
    gpu_seconds = makespan_s * rules.gpus
    return ClusterMetrics(
        jobs=len(finished),
        makespan_s=makespan_s,
        mean_jct_s=float(times_s.mean()),
        p95_jct_s=float(np.quantile(times_s, 0.95)),
        mean_wait_s=float(np.mean(waits_s)),
        ooms=len(crashed),
        wasted_gpu_s=sum((run.end_s - run.start_s) * len(run.gpus) for run in crashed),
        memory_utilisation=sum(map(_byte_seconds, finished)) / (rules.capacity_bytes * gpu_seconds),
        gpu_utilisation=_busy_s(runs) / gpu_seconds,
    )


def _byte_seconds(run: AttemptRecord) -> float:
    held_s = 0.0 if run.peak_s is None else run.end_s - run.peak_s
    return held_s * run.submission.job.peak_bytes * len(run.gpus)


def _busy_s(runs: Sequence[AttemptRecord]) -> float:
    """Return the GPU time with a job; overlapping attempts count once."""
    busy_s, until_s = 0.0, dict[int, float]()
    for run in sorted(runs, key=lambda run: run.start_s):
        for gpu in run.gpus:
            start_s = max(run.start_s, until_s.get(gpu, 0.0))
            busy_s += max(0.0, run.end_s - start_s)
            until_s[gpu] = max(start_s, run.end_s)
    return busy_s
