"""The workload of a simulation: jobs with their true peaks, and a trace of their arrivals."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

ESTIMATE_COLUMNS: Mapping[str, str] = {
    "gpumemnet": "gpumemnet_mib",
    "horus": "horus_mib",
    "faketensor": "faketensor_mib",
}
"""The columns of the job table with the published estimates of others."""
_JOB_COLUMNS = ("job", "num_gpus", "batch_size", "actual_peak_mib", "solo_seconds")
_TRACE_COLUMNS = ("arrival_s", "job")


@dataclass(frozen=True)
class TraceJob:
    """A job of a trace: its memory, and its run time on GPUs of its own."""

    name: str
    gpus: int
    batch_size: int
    peak_bytes: int
    """On each of its GPUs, context included."""
    solo_s: float
    estimates_bytes: Mapping[str, int] = field(default_factory=dict)
    """By estimator; one without an estimate is absent."""


@dataclass(frozen=True)
class Submission:
    """The arrival of a job."""

    number: int
    arrival_s: float
    job: TraceJob


def read_jobs(path: Path) -> dict[str, TraceJob]:
    """Read the table of jobs, by name."""
    jobs: dict[str, TraceJob] = {}
    for number, line in _lines(path, _JOB_COLUMNS):
        job = _job(line, f"{path}:{number}")
        if job.name in jobs:
            raise UserError(f"expected each job once in {path}, found {job.name!r} again at line {number}: remove it")
        jobs[job.name] = job
    return jobs


def read_trace(path: Path, jobs: Mapping[str, TraceJob]) -> list[Submission]:
    """Read the arrivals of a trace in order of time."""
    arrivals = []
    for number, line in _lines(path, _TRACE_COLUMNS):
        if line["job"] not in jobs:
            raise UserError(
                f"expected a job of the table at {path}:{number}, found {line['job']!r}: add it to the jobs"
            )
        arrival_s = _number(line["arrival_s"], "arrival_s", f"{path}:{number}", least=0)
        arrivals.append((arrival_s, jobs[line["job"]]))
    if not arrivals:
        raise UserError(f"expected arrivals in {path}, found none: name another file")
    arrivals.sort(key=lambda item: item[0])  # stable: simultaneous arrivals keep the order of the file
    return [Submission(number, arrival_s, job) for number, (arrival_s, job) in enumerate(arrivals)]


def _lines(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lines = [(reader.line_num, {key: value or "" for key, value in line.items() if key}) for line in reader]
            names = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"expected a CSV table at {path}, found: {error}; name another file") from error
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(f"expected the columns {list(columns)} in {path}, found {names}: add {missing}")
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
