"""The ranks of a script on several GPUs: one run for each that may differ, and the report of the largest."""

from collections.abc import Callable
from dataclasses import replace

from vramcast.simulation.result import RankPeaks, Simulation
from vramcast.simulation.scripts.report import RunReport


def with_distinct_ranks(first: RunReport, run: Callable[[int], RunReport], device: str) -> RunReport:
    """Run the ranks that may differ from the first one, and return the report of the largest with the peaks of all.

    Args:
        first: The report of rank 0, which names the ranks that may differ.
        run: Runs another rank.
        device: The device whose peaks are compared.
    """
    reports: list[tuple[RankPeaks, RunReport]] = []
    for group in first.rank_groups:
        report = run(group.rank) if group.rank else first
        if report.simulation is None or (report.failure and not report.ran_out_of_memory):
            return report  # the error of a rank is the error of the run
        reports.append((peaks_of_rank(report, group.rank, group.count, device), report))
    if not reports:
        return first
    reports.sort(key=lambda item: (item[0].reserved_bytes, item[0].allocated_bytes), reverse=True)
    largest = reports[0][1]
    simulation: Simulation = replace(_simulation(largest), ranks=_merged([peaks for peaks, _ in reports]))
    return replace(largest, simulation=simulation)


def peaks_of_rank(report: RunReport, rank: int, count: int, device: str) -> RankPeaks:
    """Return the need of a rank, or of one device of a process, on a kind of device."""
    peak = _simulation(report).peaks[device]
    need = peak.unbounded or peak.bounded
    return RankPeaks(rank, count, need.allocated_bytes or 0, need.reserved_bytes or 0)


def _simulation(report: RunReport) -> Simulation:
    if report.simulation is None:
        raise ValueError("expected the report of a script that trained, found none")
    return report.simulation


def _merged(peaks: list[RankPeaks]) -> tuple[RankPeaks, ...]:
    """Return the peaks, with ranks that came out equal as one group."""
    groups: dict[tuple[int, int], RankPeaks] = {}
    for item in peaks:
        key = (item.allocated_bytes, item.reserved_bytes)
        same = groups.get(key)
        if same is None:
            groups[key] = item
        else:
            groups[key] = replace(same, rank=min(same.rank, item.rank), count=same.count + item.count)
    return tuple(groups.values())
