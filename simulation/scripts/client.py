"""The parent's side of a run: start the child, pass on what the script prints, and keep it within its limits."""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramcast.child.messages import DONE
from vramcast.child.process import (
    Child,
    ChildError,
    ChildMemoryError,
    ChildTimeoutError,
    Limits,
    describe_exit,
    module_command,
)
from vramcast.child.process_tree import continue_stopped, descendants
from vramcast.errors import UserError
from vramcast.simulation.result import Peaks, RankPeaks
from vramcast.simulation.sandbox.failures import NetworkError, raise_failure
from vramcast.simulation.sandbox.file_protection.changes import Changes
from vramcast.simulation.sandbox.file_protection.kernel import can_refuse_writes
from vramcast.simulation.sandbox.file_protection.protection import FORCED, REDIRECT
from vramcast.simulation.sandbox.isolation import SECRET_WORDS, SUPERVISOR_SECONDS, clean_environment
from vramcast.simulation.scripts.child import FILES, NO_SNAPSHOT, REPORTING, STARTED
from vramcast.simulation.scripts.command_line import ScriptCommand
from vramcast.simulation.scripts.ranks import peaks_of_rank, with_distinct_ranks
from vramcast.simulation.scripts.report import RunReport
from vramcast.simulation.scripts.report_memory import MOST_BYTES
from vramcast.simulation.scripts.stop_rule import AUTO
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.replay.length_orders import LengthOrders

if TYPE_CHECKING:
    from vramcast.virtual_gpu.profile import DeviceProfile

TIMEOUT_SECONDS = 600.0
MEMORY_MIB = 16_384
_START_SECONDS = 120.0
"""For the imports of torch, before the script starts."""
_GRACE_SECONDS = 10.0
"""For the report to begin, after the script's own time is over."""
_REPORT_SECONDS = 300.0
"""For the replays of the report."""
_QUIET = {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a script is run."""

    steps: int | None = None
    phases: str = AUTO
    """How far the run goes, see `stop_rule.PHASES`."""
    timeout_seconds: float = TIMEOUT_SECONDS
    memory_mib: int = MEMORY_MIB
    nonzero_fraction: float = 1.0
    allow_network: bool = False
    keep_files: bool = False
    """Copy files that the script makes anew to the disk."""
    unprotected: bool = False
    """Let the script change files where they cannot be protected."""
    snapshot: Path | None = None
    rank: int | None = None
    """The rank of a run on several GPUs that is simulated; None for all that differ."""
    devices: int = 1
    """Devices of one process, each of which is observed in a run of its own."""
    stand_ins: tuple[str, ...] = ()
    """Libraries that a stand-in replaces where they are absent."""
    protection: str | None = None
    """The only way to protect files that is tried; None for all."""
    results: tuple[Path, ...] = ()
    """Files that the script writes for the caller: they stay."""
    world_size: int = 1
    """The number of ranks, known after the first has run."""
    orders: LengthOrders | None = None
    """Orders of batches that the steps of the script are replayed with."""


def run_script(
    command: ScriptCommand, profile: "DeviceProfile", others: Sequence["DeviceProfile"], options: RunOptions
) -> RunReport:
    """Run a command on a virtual GPU; on several, each rank that may differ from the first."""
    if options.devices > 1:
        return _run_on_devices(command, profile, others, options)
    report = _run_with_need(command, profile, others, options)

    def run_rank(rank: int) -> RunReport:
        print(f"vramcast run: rank {rank} of {report.world_size}", file=sys.stderr)
        return _run_with_need(command, profile, others, replace(options, rank=rank, world_size=report.world_size))

    if options.rank is None:
        return with_distinct_ranks(report, run_rank, profile.name)
    return replace(report, assumptions=(*report.assumptions, f"rank {options.rank} alone is simulated"))


def _run_on_devices(
    command: ScriptCommand, profile: "DeviceProfile", others: Sequence["DeviceProfile"], options: RunOptions
) -> RunReport:
    """Run a command once for each device of its process; return the report of the device that takes most."""
    if command.program.kind in ("torchrun", "accelerate"):
        raise UserError(
            f"expected --devices beside a command that runs in one process, found {command.program.kind}: leave "
            "--devices out, each process of a launcher has a device of its own"
        )
    reports: list[tuple[RankPeaks, RunReport]] = []
    for ordinal in range(options.devices):
        print(f"vramcast run: cuda:{ordinal} of {options.devices}", file=sys.stderr)
        report = _run_with_need(command, profile, others, replace(options, rank=ordinal))
        if report.failure and not report.ran_out_of_memory:
            return report
        if report.simulation is not None:
            reports.append((peaks_of_rank(report, ordinal, 1, profile.name), report))
    if not reports:
        return report
    peaks, largest = max(reports, key=lambda item: (item[0].reserved_bytes, item[0].allocated_bytes))
    note = f"the figures are those of cuda:{peaks.rank}, the device that takes most of {options.devices} in the process"
    devices = tuple(item for item, _ in reports)
    return replace(largest, devices=devices, assumptions=(note, *largest.assumptions))


def _run_with_need(
    command: ScriptCommand, profile: "DeviceProfile", others: Sequence["DeviceProfile"], options: RunOptions
) -> RunReport:
    """Run a rank; where it runs out of memory, once more on an unbounded device, for its need.

    Where it fails at a write that an overlay cannot take, it runs once more with redirected files.
    """
    report = _run_once(command, profile, others, options, unbounded=False)
    if report.overlay_refused and FORCED not in os.environ and can_refuse_writes():
        print(
            "vramcast run: the overlay over the files refused a write; running again with redirection", file=sys.stderr
        )
        return _run_with_need(command, profile, others, replace(options, protection=REDIRECT))
    if not report.ran_out_of_memory:
        return report
    print("vramcast run: out of memory; running again on an unbounded device to find the need", file=sys.stderr)
    need = _run_once(command, profile, others, options, unbounded=True)
    return _with_need(report, need, profile.name)


def _with_need(report: RunReport, need: RunReport, device: str) -> RunReport:
    """Return a report whose figures are those of the unbounded run, and whose verdict is that of the device."""
    if need.simulation is None:
        return report
    unbounded = need.simulation.peaks[device].unbounded
    if report.simulation is None:  # it ran out before any network ran
        bounded = replace(need.simulation.peaks[device].bounded, status=Status.OOM, evidence=report.failure)
    else:
        bounded = report.simulation.peaks[device].bounded
    peaks = {**need.simulation.peaks, device: Peaks(bounded, unbounded)}
    values = {**vars(need), "ending": report.ending, "failure": report.failure, "ran_out_of_memory": True}
    values["simulation"] = replace(need.simulation, peaks=peaks)
    return RunReport(**values)


def _run_once(
    command: ScriptCommand,
    profile: "DeviceProfile",
    others: Sequence["DeviceProfile"],
    options: RunOptions,
    *,
    unbounded: bool,
) -> RunReport:
    request = {
        "program": command.program.to_json(),
        "device": asdict(profile),
        "devices": [asdict(item) for item in others],
        "steps": options.steps,
        "phases": options.phases,
        "timeout": options.timeout_seconds,
        "unbounded": unbounded,
        "nonzero_fraction": options.nonzero_fraction,
        "allow_network": options.allow_network,
        "keep_files": options.keep_files,
        "unprotected": options.unprotected,
        "rank": options.rank or 0,
        "devices_of_process": options.devices,
        "stand_ins": list(options.stand_ins),
        "world_size": options.world_size,
        "orders": asdict(options.orders) if options.orders else None,
        "snapshot": _real_path(options.snapshot) if options.snapshot else None,
        "results": list(map(_real_path, options.results)),
    }
    words = module_command("vramcast.simulation.scripts.child", python=command.interpreter, flags=command.flags)
    environment = {**_environment(options), **dict(command.variables)}
    place = Path(command.directory) if command.directory else None
    with _EchoingChild(words, environment, MOST_BYTES, place, term_seconds=SUPERVISOR_SECONDS) as child:
        child.send(request)
        return _received(child, options)


def _real_path(path: Path) -> str:
    """Return where a file is written: protections know directories without links."""
    return str(path.parent.resolve() / path.name)


class _EchoingChild(Child):
    """A child whose output is passed on to the standard error."""

    def printed(self, data: bytes) -> None:
        """Pass the output on, and keep its end."""
        super().printed(data)
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()


def _received(child: Child, options: RunOptions) -> RunReport:
    """Wait for the report, and for the changes of files, which follow when all processes of the script have ended."""
    patience = {STARTED: options.timeout_seconds + _GRACE_SECONDS, REPORTING: _REPORT_SECONDS, DONE: math.inf}
    limits = Limits(memory_bytes=options.memory_mib * MIB)
    limits.extend(_START_SECONDS + options.timeout_seconds)
    time_over = math.inf
    report: RunReport | None = None
    changes = Changes("none")

    def continue_script() -> None:
        continue_stopped([child.process.pid])  # the supervisor: the script may have stopped whoever started it
        if time.monotonic() >= time_over:
            continue_stopped(descendants(child.process.pid))

    try:
        for message in child.follow(limits, continue_script):
            raise_failure(message)
            kind = message["event"]
            if kind in patience:
                limits.extend(patience[kind])
            if kind == STARTED:
                time_over = time.monotonic() + options.timeout_seconds
            elif kind == DONE:
                report = RunReport.from_json(message["report"])
            elif kind == NO_SNAPSHOT:
                changes = replace(changes, lost=(f"{options.snapshot}: {message['reason']}",))
            elif kind == FILES and report is not None:
                final = Changes.from_json(message["changes"])
                return replace(report, changes=replace(final, lost=(*changes.lost, *final.lost)))
    except ChildError as error:
        if child.has_ended() and report is not None:
            return replace(report, changes=changes)
        raise _in_words(error, child, options) from None
    raise AssertionError("a child is followed up to its end")


def _in_words(error: ChildError, child: Child, options: RunOptions) -> Exception:
    if isinstance(error, ChildTimeoutError):
        return UserError(
            f"expected a report within {options.timeout_seconds:g} s, found none: the script waits outside of "
            "Python; raise --timeout"
        )
    if isinstance(error, ChildMemoryError):
        return UserError(
            f"expected a script within {options.memory_mib} MiB of this machine's memory, found that it took more: "
            "raise --memory-limit-mib, or let it load less data"
        )
    return NetworkError(child.fault or describe_exit(child.exit_code), None, child.last_output)


def _environment(options: RunOptions) -> dict[str, str]:
    """Return the user's variables without those that look like secrets: a script may need any other."""
    passed = {name: value for name, value in os.environ.items() if not any(word in name for word in SECRET_WORDS)}
    forced = {FORCED: options.protection} if options.protection else {}
    return {**passed, **clean_environment(os.environ, allow_network=options.allow_network), **_QUIET, **forced}
