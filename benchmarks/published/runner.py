"""Run published jobs on the virtual GPU, each in the interpreter of its stack."""

import json
import runpy
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.job import RANK_SCRIPT, PublishedJob
from benchmarks.published.ranks.client import rank_files, run_rank
from benchmarks.published.stacks import ROOT, interpreter
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.families.libraries import tolerate_broken_torchvision
from vramcast.simulation.result import OrderPeaks, Simulation, with_orders
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.simulation.scripts.report import RunReport
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.profile import DeviceProfile

_SCRIPTS = Path(__file__).resolve().parent / "scripts"
_ALL_STEPS = 10**6
"""A script decides itself when it ends."""
_TIMEOUT_SECONDS = 600.0
_RANK = 0
"""Sources publish the memory of the first rank."""


@dataclass(frozen=True)
class Figures:
    """The figures that a script would report on a GPU."""

    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int | None = None
    """Allocated bytes and freed blocks that another stream still uses, where the script reports them."""


def script_files(job: PublishedJob) -> list[Path]:
    """Return the files that decide what a job does."""
    if job.script == RANK_SCRIPT:
        return rank_files()
    names = [job.script, "common", *(["gptq_base"] if "GPTQ" in job.group else [])]
    names += ["operators"] if job.script == "liger_operators" else []
    return [_SCRIPTS / f"{name}.py" for name in names]


def profile_of(job: PublishedJob) -> DeviceProfile:
    """Return the device of a job, with the memory that its GPU shows."""
    profile = load_profile(job.device)
    if job.visible_mib is None:
        return profile
    return replace(profile, total_mib=job.visible_mib + profile.driver_mib)


def simulate_job(job: PublishedJob, stacks: Path = ROOT) -> tuple[Figures, Simulation | None]:
    """Return the figures of a job and its simulation; an operator trains no network and has none."""
    if job.script == RANK_SCRIPT:
        python = interpreter(job.stack, stacks) if job.stack else Path(sys.executable)
        figures, simulation = run_rank(job.title, job.parameters, profile_of(job), python, _TIMEOUT_SECONDS)
        return Figures(**figures), simulation
    script_figures, report = run_job(job, stacks)
    return script_figures, None if report is None else _simulation_of(job, report)


def _simulation_of(job: PublishedJob, report: RunReport) -> Simulation | None:
    """Return the simulation of a script, with the orders of its batches if their lengths vary."""
    if report.simulation is None or not report.reserved_by_order:
        return report.simulation
    return with_orders(report.simulation, job.device, OrderPeaks(report.reserved_by_order))


def run_job(job: PublishedJob, stacks: Path = ROOT) -> tuple[Figures, RunReport | None]:
    """Run the script of a job and return what it reports; without a stack it runs here and has no report."""
    with tempfile.TemporaryDirectory(prefix="vramcast-") as directory:
        path = Path(directory) / "figures.json"
        words = [str(_SCRIPTS / f"{job.script}.py"), json.dumps({**job.parameters, "figures": str(path)})]
        profile = profile_of(job)
        report = None
        if job.stack is None:
            _run_here(words, profile)
        else:
            options = RunOptions(
                steps=_ALL_STEPS, timeout_seconds=_TIMEOUT_SECONDS, stand_ins=("flash_attn",),
                nonzero_fraction=job.nonzero_fraction, orders=job.orders, results=(path,),
                rank=_RANK if job.launcher else None,
            )  # fmt: skip
            command = parse_command([str(interpreter(job.stack, stacks)), *job.launcher, *words])
            report = run_script(command, profile, [], options)
            if not path.exists():
                raise UserError(f"expected figures of {job.title}, found none: {report.failure or report.ending}")
        return Figures(**json.loads(path.read_text(encoding="utf-8"))), report


def _run_here(words: list[str], profile: DeviceProfile) -> None:
    tolerate_broken_torchvision()
    before = sys.argv, list(sys.path)
    sys.argv = words
    sys.path.insert(0, str(_SCRIPTS))
    try:
        with CudaEmulation(profile, unbounded=True):
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
