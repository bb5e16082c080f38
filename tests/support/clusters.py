"""Jobs and traces for tests of the simulator, in GB so that sums are easy to see."""

from collections.abc import Sequence

from vramcast.collocation.cluster_simulation.workload import Submission, TraceJob

GB = 10**9


def job(name: str, peak_gb: float, solo_s: float, gpus: int = 1) -> TraceJob:
    return TraceJob(name, gpus, 1, int(peak_gb * GB), solo_s)


def trace(*arrivals: tuple[float, TraceJob]) -> list[Submission]:
    return [Submission(number, arrival_s, job) for number, (arrival_s, job) in enumerate(arrivals)]


def truth(submissions: Sequence[Submission]) -> dict[str, int]:
    """Return the true peaks, which an oracle reserves."""
    return {item.job.name: item.job.peak_bytes for item in submissions}
