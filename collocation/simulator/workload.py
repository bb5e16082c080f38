"""What is to be run: jobs with their true peaks, and a trace that says when each arrives."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vramcast.errors import UserError
from vramcast.virtual_gpu.sizes import MIB

ESTIMATE_COLUMNS: Mapping[str, str] = {
    "gpumemnet": "gpumemnet_mib",
    "horus": "horus_mib",
    "faketensor": "faketensor_mib",
}
"""Estimates that others published, by the column of the table of jobs that has them."""
_JOB_COLUMNS = ("job", "num_gpus", "batch_size", "actual_peak_mib", "solo_seconds")
_TRACE_COLUMNS = ("arrival_s", "job")


@dataclass(frozen=True)
class TraceJob:
    """What a job takes and for how long it runs when it is alone."""

    name: str
    gpus: int
    batch_size: int
    peak_bytes: int
    """On each of its GPUs, context included."""
    solo_s: float
    estimates_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the estimator that published it; an estimator that has none is absent."""


@dataclass(frozen=True)
class Submission:
    """A job of a trace."""

    number: int
    arrival_s: float
    job: TraceJob


def read_jobs(path: Path) -> dict[str, TraceJob]:
    """The table of jobs, by name."""
    jobs: dict[str, TraceJob] = {}
    for number, line in _lines(path, _JOB_COLUMNS):
        job = _job(line, f"{path}:{number}")
        if job.name in jobs:
            raise UserError(f"expected each job once in {path}, found {job.name!r} again at line {number}: remove it")
        jobs[job.name] = job
    return jobs


def read_trace(path: Path, jobs: Mapping[str, TraceJob]) -> list[Submission]:
    """The arrivals in a trace, in order of time."""
    found = []
    for number, line in _lines(path, _TRACE_COLUMNS):
        if line["job"] not in jobs:
            raise UserError(
                f"expected a job of the table at {path}:{number}, found {line['job']!r}: add it to the jobs"
            )
        arrival_s = _number(line["arrival_s"], "arrival_s", f"{path}:{number}", least=0)
        found.append((arrival_s, jobs[line["job"]]))
    if not found:
        raise UserError(f"expected arrivals in {path}, found none: name another file")
    found.sort(key=lambda item: item[0])  # stable: jobs of one moment stay in the order of the file
    return [Submission(number, arrival_s, job) for number, (arrival_s, job) in enumerate(found)]


def _lines(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lines = [(reader.line_num, {key: value or "" for key, value in line.items() if key}) for line in reader]
            found = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"expected a CSV table at {path}, found: {error}; name another file") from error
    missing = [name for name in columns if name not in found]
    if missing:
        raise UserError(f"expected the columns {list(columns)} in {path}, found {found}: add {missing}")
    return lines


def _job(line: Mapping[str, str], where: str) -> TraceJob:
    counts = {name: int(_number(line[name], name, where, least=1)) for name in ("num_gpus", "batch_size")}
    estimates = {
        name: round(_number(line[column], column, where, least=0) * MIB)
        for name, column in ESTIMATE_COLUMNS.items()
        if line.get(column)
    }
    return TraceJob(
        line["job"],
        counts["num_gpus"],
        counts["batch_size"],
        round(_number(line["actual_peak_mib"], "actual_peak_mib", where, least=1) * MIB),
        _number(line["solo_seconds"], "solo_seconds", where, least=1e-6),
        estimates,
    )


def _number(text: str, name: str, where: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise UserError(f"expected {name} to be a number from {least:g} at {where}, found {text!r}: change it")
    return value
