"""Compare published fine-tuning runs with their simulation, by the memory that each source published."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from benchmarks.published.job import PublishedJob
from benchmarks.published.runner import Figures, profile_of, script_files, simulate_job
from benchmarks.published.stacks import releases
from benchmarks.published.tables import PublishedTable
from vramcast.dataset_builder.store.cache import read_entry, write_entry
from vramcast.defaults import CHECKPOINT, RISK, cache_directory
from vramcast.errors import UserError
from vramcast.models.metrics import wilson_interval
from vramcast.models.predictor import Predictor, Question
from vramcast.progress import bar
from vramcast.simulation.result import Simulation
from vramcast.simulation.sandbox.failures import NetworkError
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.canonical import content_hash
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.version import VERSION

_WORST = 5
_FORMAT = 2
"""The format of stored simulations."""
HERE, ANSWERS = "here", "answers"
"""Locks: of jobs that run in this process, and of the estimator."""


@dataclass(frozen=True)
class Result:
    """The simulated figures of a job, by metric, and the safe figures at the risk of the answer."""

    bytes_by_metric: Mapping[str, int]
    safe_bytes_by_metric: Mapping[str, int]
    """Empty for a script that trains no network."""


@dataclass(frozen=True)
class PublishedComparison:
    """A job with its result."""

    job: PublishedJob
    result: Result

    @property
    def error(self) -> float:
        """The relative error of the simulation."""
        return self.result.bytes_by_metric[self.job.metric] / self.job.published_bytes - 1

    @property
    def safe_over(self) -> float | None:
        """The safe figure relative to the published one, minus 1; None for allocated memory, which has none."""
        safe = self.result.safe_bytes_by_metric.get(self.job.metric)
        return None if safe is None else safe / self.job.published_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """Return what a reader needs to find the row."""
        return {
            "job": self.job.title,
            "stack": self.job.stack,
            "runs": self.job.runs,
            "metric": self.job.metric,
            "published_gib": self.job.published_bytes / MIB / 1024,
            "simulated_gib": self.result.bytes_by_metric[self.job.metric] / MIB / 1024,
            "relative_error": self.error,
        }


class PublishedStore:
    """A directory with one file for each simulated job, so that an interrupted evaluation resumes."""

    def __init__(self, directory: Path | str | None, stacks: Path) -> None:
        self.directory = (Path(directory) if directory else cache_directory()) / "published"
        self._stacks = stacks
        self._predictor: Predictor | None = None
        self._one_at_a_time: dict[str, RLock] = defaultdict(RLock)

    def attempt(self, job: PublishedJob) -> Result | str:
        """Return the result of a job, or why there is none; equal jobs of several metrics are simulated once."""
        with self._one_at_a_time[self._key(job) if job.stack else HERE]:
            try:
                return self.result(job)
            except (UserError, NetworkError) as error:
                return str(error)

    def result(self, job: PublishedJob) -> Result:
        """Return the result of a job, simulated now or before; safe figures are those of the released checkpoint."""
        path = self.directory / f"{self._key(job)}.json"
        if (stored := read_entry(path, _simulated)) is not None:
            return self._result(job, *stored)
        figures, simulation = simulate_job(job, self._stacks)
        write_entry(path, {"figures": asdict(figures), "simulation": simulation.to_json() if simulation else None})
        return self._result(job, figures, simulation)

    def _key(self, job: PublishedJob) -> str:
        scripts = sha256(b"".join(path.read_bytes() for path in script_files(job))).hexdigest()
        stack = releases(job.stack) if job.stack else [f"torch=={version('torch')}"]
        parts = {"job": job.key, "scripts": scripts, "stack": stack, "virtual_gpu": VERSION, "format": _FORMAT}
        return content_hash(parts)

    def _result(self, job: PublishedJob, figures: Figures, simulation: Simulation | None) -> Result:
        counted = {"allocated": figures.allocated_bytes, "reserved": figures.reserved_bytes}
        if figures.active_bytes is not None:
            counted["active"] = figures.active_bytes
        if simulation is None:
            return Result(counted, {})
        profile = profile_of(job)
        peaks = simulation.peaks[profile.name]
        if peaks.orders:
            counted["reserved"] = int(peaks.bounded.reserved_bytes or 0)
        question = _question(job, simulation, profile)
        with self._one_at_a_time[ANSWERS]:
            self._predictor = self._predictor or Predictor.load(CHECKPOINT)
            answer = self._predictor.answers([question], RISK)[0]
        peak = peaks.unbounded or peaks.bounded
        beside = int(peak.device_used_bytes or 0) - int(peak.reserved_bytes or 0)
        safe = int(answer.safe_mib * MIB)
        return Result({**counted, "smi": counted["reserved"] + beside}, {"reserved": safe - beside, "smi": safe})


def _simulated(values: Mapping[str, Any]) -> tuple[Figures, Simulation | None]:
    simulation = Simulation.from_json(values["simulation"]) if values["simulation"] else None
    return Figures(**values["figures"]), simulation


def _question(job: PublishedJob, simulation: Simulation, profile: DeviceProfile) -> Question:
    question = Question.of_simulation(job.title, simulation, profile)
    if not job.guesses_lengths:
        return question
    unbounded = question.unbounded and replace(question.unbounded, assumed=True)
    return replace(question, example=replace(question.example, assumed=True), unbounded=unbounded)


def evaluate_published(
    table: PublishedTable, store: PublishedStore, rows: int | None = None, worst: int = _WORST, workers: int = 1
) -> dict[str, Any]:
    """Simulate the jobs of a table, several at a time, and return the figures of each group and metric."""
    jobs = table.jobs[:rows]
    compared: list[PublishedComparison] = []
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(store.attempt, jobs)
        for job, result in zip(jobs, bar(results, total=len(jobs), unit="job", desc="published runs"), strict=True):
            if isinstance(result, Result):
                compared.append(PublishedComparison(job, result))
            else:
                failed[job.title] = result
                print(f"note: {job.title} was not simulated: {result}", file=sys.stderr)
    groups: dict[tuple[str, str], list[PublishedComparison]] = {}
    for item in compared:
        groups.setdefault((item.job.group, item.job.metric), []).append(item)
    return {
        "groups": [
            {"group": group, "metric": metric, **_figures(items), "worst": _worst(items, worst)}
            for (group, metric), items in sorted(groups.items())
        ],
        "jobs": len(compared),
        "rows": sum(item.job.runs for item in compared),
        "skipped": dict(table.left_out.most_common()),
        "failed": failed,
        "assumptions": sorted({text for item in compared for text in item.job.assumptions}),
        **_safe_figures(compared),
        "risk": RISK,
    }


def _figures(items: Sequence[PublishedComparison]) -> dict[str, Any]:
    errors = np.abs([item.error for item in items])
    return {
        "jobs": len(items),
        "rows": sum(item.job.runs for item in items),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        **_safe_figures(items),
    }


def _safe_figures(items: Iterable[PublishedComparison]) -> dict[str, Any]:
    """Return how often safe figures are too low, with its confidence interval, and how far they are above the truth.

    All are None where no job has a safe figure.
    """
    over = np.array([item.safe_over for item in items if item.safe_over is not None])
    low = over < 0
    return {
        "safe_too_low": float(low.mean()) if len(over) else None,
        "safe_too_low_interval": wilson_interval(low.tolist()) if len(over) else None,
        "safe_over_relative_median": float(np.median(over)) if len(over) else None,
        "safe_jobs": len(over),
    }


def _worst(items: Sequence[PublishedComparison], count: int) -> list[dict[str, Any]]:
    return [item.to_json() for item in sorted(items, key=lambda item: -abs(item.error))[:count]]


def _share(share: float, interval: tuple[float, float]) -> str:
    return f"{share:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"


def published_text(figures: Mapping[str, Any]) -> str:
    """Return the figures as a table, with the reasons for which rows were left out."""
    lines = [
        f"{'group':28} {'metric':10} {'jobs':>5} {'rows':>5} {'median':>9} {'p90':>9} {'safe too low (interval)':>26} "
        f"{'above':>6}"
    ]
    for item in figures["groups"]:
        low = "" if item["safe_too_low"] is None else _share(item["safe_too_low"], item["safe_too_low_interval"])
        above = "" if item["safe_over_relative_median"] is None else f"{item['safe_over_relative_median']:.1%}"
        lines.append(
            f"{item['group']:28} {item['metric']:10} {item['jobs']:5} {item['rows']:5} {item['median']:9.3%} "
            f"{item['p90']:9.3%} {low:>26} {above:>6}"
        )
        lines += [
            f"  {row['relative_error']:+9.3%} published {row['published_gib']:9.4f} simulated "
            f"{row['simulated_gib']:9.4f} GiB  {row['job']}"
            for row in item["worst"]
        ]
    lines += [f"assumed: {text}" for text in figures["assumptions"]]
    lines += [f"skipped: {count} rows, {reason}" for reason, count in figures["skipped"].items()]
    lines += [f"failed: {title}: {reason}" for title, reason in figures["failed"].items()]
    return "\n".join(lines)
