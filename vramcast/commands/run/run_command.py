"""`vramcast run`: run a training script, unmodified and without a GPU, and report the memory that it would take."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramcast.commands.exit_codes import FAILED, CommandParser, checked, exit_code
from vramcast.defaults import BUCKET_MIB, CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE, device_file
from vramcast.errors import UserError, check_amount, check_count
from vramcast.models.answer import FITS, Answer
from vramcast.simulation.sandbox.failures import InternalError, NetworkError
from vramcast.simulation.scripts.client import MEMORY_MIB, TIMEOUT_SECONDS, RunOptions, run_script
from vramcast.simulation.scripts.command_line import ScriptCommand, parse_command
from vramcast.simulation.scripts.report import RunReport
from vramcast.simulation.scripts.stop_rule import AUTO, PHASES

if TYPE_CHECKING:
    from vramcast.models.predictor import Predictor

_SCRIPT_ERROR = 3
_MOST_DEVICES = 64
_REPORT = "this is an error of vramcast, not of the script: please report it with the traceback above"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_code("vramcast run", lambda: _run(list(argv)))


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog="vramcast run",
        usage="vramcast run [options] -- COMMAND",
        description=__doc__,
        epilog="COMMAND is what starts the training: python train.py --lr 3e-4, python -m my.module, torchrun ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default=DEFAULT_DEVICE, metavar="NAME", help=f"a profile; default {DEFAULT_DEVICE}")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps; default: until the peak has settled")
    parser.add_argument(
        "--phases", default=AUTO, choices=PHASES, help="until each phase was seen, training has settled, or to the end"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS", help="for the script")
    parser.add_argument("--memory-limit-mib", type=int, default=MEMORY_MIB, metavar="N", help="of this machine")
    parser.add_argument(
        "--assume-nonzero", default="all", metavar="all|FRACTION", help="places that a mask with unknown values selects"
    )
    parser.add_argument("--rank", type=int, metavar="N", help="the only rank to simulate; default: all that differ")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices that one process sees; default: CUDA_VISIBLE_DEVICES, or 1"
    )
    parser.add_argument(
        "--stand-in", action="append", default=[], choices=["flash_attn"], help="for a library that is not installed"
    )
    parser.add_argument("--allow-network", action="store_true", help="let the script reach other machines")
    parser.add_argument("--keep-files", action="store_true", help="keep files that the script makes anew")
    parser.add_argument("--unprotected", action="store_true", help="let the script change and delete your files")
    parser.add_argument("--risk", type=float, default=RISK, help=f"that the safe figure is too low; default {RISK}")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_MIB, metavar="N", help="the width of a bucket")
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="NAME", help="the estimator: a name or directory")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the job does not fit safely")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the job for schedulers that cannot run its code"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory over the run (.png or .svg)")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="write a snapshot for pytorch.org/memory_viz")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=argparse.SUPPRESS)
    return parser


def _run(argv: list[str]) -> int:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    arguments = make_parser().parse_args(own)
    options = _options(arguments)
    parsed = parse_command([*arguments.command, *command])  # a wrong one is refused before torch is imported
    if arguments.export:
        from vramcast.simulation.exported_job import check_export_path  # noqa: PLC0415

        check_export_path(arguments.export)
    if arguments.plot:
        from vramcast.models.timeline import check_picture  # noqa: PLC0415

        check_picture(arguments.plot)
    return _answer(arguments, parsed, options)


def _options(arguments: argparse.Namespace) -> RunOptions:
    if arguments.steps is not None:
        check_count("--steps", arguments.steps)
    check_amount("--timeout", arguments.timeout, zero=False)
    if arguments.rank is not None:
        check_count("--rank", arguments.rank, least=0)
    check_count("--memory-limit-mib", arguments.memory_limit_mib)
    check_count("--bucket-mib", arguments.bucket_mib)
    if not 0 < arguments.risk < 1:
        raise UserError(f"expected --risk to be a number between 0 and 1, found {arguments.risk}: change it")
    if arguments.snapshot and arguments.snapshot.is_dir():
        raise UserError(f"expected a file for --snapshot, found the directory {arguments.snapshot}: name a file in it")
    if arguments.snapshot and not arguments.snapshot.absolute().parent.is_dir():
        raise UserError(f"expected a directory for --snapshot {arguments.snapshot}, found none: make it")
    device_file(arguments.device)  # an unknown device fails before torch is imported
    return RunOptions(
        steps=arguments.steps,
        phases=arguments.phases,
        timeout_seconds=arguments.timeout,
        memory_mib=arguments.memory_limit_mib,
        nonzero_fraction=_fraction(arguments.assume_nonzero),
        allow_network=arguments.allow_network,
        keep_files=arguments.keep_files,
        unprotected=arguments.unprotected,
        snapshot=arguments.snapshot,
        rank=arguments.rank,
        stand_ins=tuple(arguments.stand_in),
        devices=_devices(arguments.devices),
    )


def _devices(named: int | None) -> int:
    """Return how many devices a process sees: those that are named, and no more than are visible."""
    if named is not None:
        check_count("--devices", named, most=_MOST_DEVICES)
    visible = len([item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip(" -")])
    return min(named or visible or 1, visible or _MOST_DEVICES, _MOST_DEVICES)


def _fraction(text: str) -> float:
    try:
        fraction = 1.0 if text == "all" else float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise UserError(f"expected --assume-nonzero all or a number from 0 to 1, found {text!r}: change it")
    return fraction


def _answer(arguments: argparse.Namespace, command: ScriptCommand, options: RunOptions) -> int:
    from vramcast.device.profiles import gpu_profiles, load_profile  # noqa: PLC0415 - imports torch
    from vramcast.models.predictor import Predictor  # noqa: PLC0415

    start = time.perf_counter()
    profile = load_profile(arguments.device)
    predictor = Predictor.load(arguments.checkpoint)  # a wrong name fails before the script starts
    others = gpu_profiles()
    try:
        report = run_script(command, profile, others, options)
    except InternalError as error:
        print(error.traceback, file=sys.stderr)
        print(f"vramcast run: {error}: {_REPORT}", file=sys.stderr)
        return FAILED
    except NetworkError as error:
        print(f"vramcast run: the script's process ended: {error}", file=sys.stderr)
        return _SCRIPT_ERROR
    code = 0 if report.ran_out_of_memory else _failure(report)
    if code and not report.steps:
        return code
    if report.simulation is None:
        notes = ", ".join((report.ending, *report.assumptions))
        remedy = "raise --timeout" if report.timed_out else "check that it picks 'cuda'"
        raise UserError(
            f"expected a script that runs a network on the GPU, found that none ran there: {remedy} ({notes})"
        )
    answer = _print(predictor, arguments, command, report, start)
    if report.changes.lost:
        raise UserError(
            f"expected to write all files that were asked for, found: {report.changes.lost[0]}; make room or name "
            "another place"
        )
    return code or checked(arguments.check, answer.verdict == FITS)


def _failure(report: RunReport) -> int:
    """Print the error that ended a script, if one did, and return the exit code."""
    if report.failure is None:
        return 0
    if report.traceback:
        print(report.traceback, file=sys.stderr)
    steps = len(report.steps)
    until = f"; the figures are those of the {steps} optimizer steps before it" if steps else ""
    if report.internal:
        print(f"vramcast run: {report.failure}: {_REPORT}{until}", file=sys.stderr)
        return FAILED
    print(f"vramcast run: the script failed: {report.failure}{until}", file=sys.stderr)
    return _SCRIPT_ERROR


def _print(
    predictor: "Predictor", arguments: argparse.Namespace, command: ScriptCommand, report: RunReport, start: float
) -> Answer:
    from vramcast.commands.classify.page import Page  # noqa: PLC0415
    from vramcast.commands.run.long_runs import covers_long_run  # noqa: PLC0415
    from vramcast.commands.run.run_screen import rendered_run, to_json  # noqa: PLC0415
    from vramcast.device.profiles import gpu_profiles, load_profile  # noqa: PLC0415
    from vramcast.models.predictor import Question  # noqa: PLC0415

    simulation: Any = report.simulation
    title = command.program.title
    profile = load_profile(arguments.device)
    devices = list({item.name: item for item in (profile, *gpu_profiles())}.values())
    questions = [Question.of_simulation(title, simulation, item) for item in devices]
    answers = predictor.answers(questions, arguments.risk, arguments.bucket_mib)
    simulated_mib = answers[0].safe_mib
    answers = [covers_long_run(replace(item, missing=report.missing), report) for item in answers]
    answer = replace(answers[0], seconds=time.perf_counter() - start)
    names = {item.name for item in gpu_profiles()}
    others = [item for item in answers if item.device in names]
    if arguments.json:
        print(json.dumps(to_json(answer, report, others), allow_nan=False))
    else:
        training = simulation.training if report.has_trained else None
        page = Page(answer, profile.title, training, simulation.costs, others)
        print(rendered_run(page, report, shutil.get_terminal_size((100, 40)).columns, sys.stdout.isatty()), end="")
    if arguments.plot and report.curve is not None:
        from vramcast.models.timeline import draw_timeline, timeline_table  # noqa: PLC0415

        draw_timeline(timeline_table(report.curve), f"{title} on {profile.title}, simulated", arguments.plot)
        print(f"{arguments.plot} written", file=sys.stderr)
    if arguments.export:
        _export(arguments.export, command, report, answer, simulated_mib)
    return answer


def _export(path: Path, command: ScriptCommand, report: RunReport, answer: Answer, simulated_mib: float) -> None:
    """Write the job, with notes on what an answer elsewhere cannot know of the run."""
    from vramcast.simulation.exported_job import exported_job, write_export  # noqa: PLC0415

    simulation: Any = report.simulation
    code = Path(command.program.name) if command.program.kind == "file" else None
    missing = tuple(f"the run did not reach: {phase}" for phase in answer.missing)
    grown = (
        f"batches vary: {answer.safe_mib:.0f} MiB is safe for a long run on {answer.device}, {simulated_mib:.0f} for "
        "the simulated steps"
    )
    job = exported_job(command.program.title, simulation, code)
    notes = [*job["notes"], *missing, *([grown] if answer.safe_mib > simulated_mib else ())]
    write_export(path, {**job, "notes": notes})
    print(f"{path} written", file=sys.stderr)
