"""`vramcast snapshot`: read a memory snapshot of torch: what fills the GPU, why it ran out, what would have helped."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.device.profiles import DEFAULT_DEVICE, device_file
from vramcast.errors import UserError, check_amount, check_count
from vramcast.simulation.scripts.client import TIMEOUT_SECONDS
from vramcast.simulation.scripts.command_line import ScriptCommand, parse_command


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_code("vramcast snapshot", lambda: _run(list(argv)))


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog="vramcast snapshot",
        usage="vramcast snapshot FILE [options] [--against -- COMMAND]",
        description=__doc__,
        epilog="FILE is what torch.cuda.memory._dump_snapshot() or `vramcast run --snapshot` wrote. None of it runs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a pickle, or JSON, also compressed (.xz, .gz)")
    parser.add_argument("--device", metavar="NAME", help="the GPU, to tell the memory of other processes")
    parser.add_argument("--lines", type=int, default=12, metavar="N", help="lines of code to show; default 12")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--against", action="store_true", help="run COMMAND on the virtual GPU, and compare it with the recording"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", default=20, help="most optimizer steps of COMMAND; default 20"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS", help="for COMMAND")
    return parser


def _run(argv: list[str]) -> int:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    arguments = make_parser().parse_args(own)
    if bool(command) != arguments.against:
        raise UserError(
            "expected --against together with -- COMMAND, found one of them: write --against -- python train.py"
        )
    if arguments.device:
        device_file(arguments.device)  # an unknown name fails before torch is imported
    return _compare(arguments, parse_command(command)) if arguments.against else _examine(arguments)


def _examine(arguments: argparse.Namespace) -> int:
    from vramcast.commands.snapshot.snapshot_page import profiler_page, rendered, to_json  # noqa: PLC0415 - imports torch
    from vramcast.device.profiles import load_profile  # noqa: PLC0415
    from vramcast.virtual_gpu.recordings.examination import examine  # noqa: PLC0415
    from vramcast.virtual_gpu.recordings.files import read_values  # noqa: PLC0415
    from vramcast.virtual_gpu.recordings.profiler_traces import is_profiler_trace, profiled_memory  # noqa: PLC0415
    from vramcast.virtual_gpu.recordings.recording import recording_of  # noqa: PLC0415

    values = read_values(arguments.file)
    if is_profiler_trace(values):
        profiled = profiled_memory(values, arguments.file.name)
        print(profiler_page(arguments.file.name, profiled, arguments.json), end="")
        return 0
    recording = recording_of(values, arguments.file.name)
    profile = load_profile(arguments.device) if arguments.device else None
    examined = [examine(recording, device, arguments.file.name) for device in recording.devices]
    if arguments.json:
        print(json.dumps(to_json(arguments.file.name, examined, profile), allow_nan=False))
    else:
        print(rendered(arguments.file.name, examined, profile, arguments.lines), end="")
    return 0


def _compare(arguments: argparse.Namespace, command: ScriptCommand) -> int:
    from vramcast.commands.snapshot.comparison_page import comparison_json, rendered_comparison  # noqa: PLC0415
    from vramcast.device.profiles import load_profile  # noqa: PLC0415
    from vramcast.simulation.scripts.comparison import compare_with_run  # noqa: PLC0415

    check_count("--steps", arguments.steps)
    check_amount("--timeout", arguments.timeout, zero=False)
    profile = load_profile(arguments.device or DEFAULT_DEVICE)
    result = compare_with_run(arguments.file, command, profile, arguments.steps, arguments.timeout)
    if arguments.json:
        print(json.dumps(comparison_json(arguments.file.name, result), allow_nan=False))
    else:
        print(rendered_comparison(arguments.file.name, result, arguments.lines), end="")
    return 0
