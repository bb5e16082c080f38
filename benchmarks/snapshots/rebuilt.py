"""Run the jobs behind public recordings on the virtual GPU: `python -m benchmarks.snapshots.rebuilt --data DIR`.

Prints the share of allocations that are equal in order, and the errors of both peaks over the recorded part.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.device.profiles import load_profile
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.simulation.scripts.comparison import compare_with_run
from vramcast.virtual_gpu.recordings.alignment import Alignment

JOBS = Path(__file__).parent / "jobs"
DEVICE = "a100_80gb"
"""Its cuBLAS workspaces are those of the recordings; whose GPU they are is not stated."""
_WITH_GRAPH = ("3333ec", "08d334", "8f7e5d", "9a3860")
"""Forward passes of LINYUN that keep a graph: their peak holds the activations."""
_AUTOCAST = ("83e7cb", "61dcd1", "2afd8b")
"""Recordings of Wedsonlin whose stacks convert to bf16."""
_LINYUN = r"linyunlinyun_xl_ctx(?P<context>\d+)_(?P<form>forward|full_step)_(?P<precision>none|bf16)_(?P<hash>\w+)\."
_WEDSONLIN = r"wedsonlin_medium_(?P<context>\d+)_(?P<form>inference|training)_memory_snapshot_(?P<hash>\w+)\."
_NIUHUANG = r"niuhuangxiaozi_(?P<form>forward|forward_and_backward)_memory_snapshot_(?P<context>\d+)(?P<mixed>_mixed)?_"


def job_of(name: str) -> tuple[str, ...] | None:
    """Return the script and arguments behind a recording, None if it is not rebuilt."""
    if match := re.match(_LINYUN, name):
        forms = {"full_step": "step", "forward": "forward" if match["hash"] in _WITH_GRAPH else "inference"}
        precision = ("--bf16",) if match["precision"] == "bf16" else ()
        return _course("xl", match["context"], forms[match["form"]], *precision)
    if match := re.match(_WEDSONLIN, name):
        precision = ("--bf16",) if match["hash"] in _AUTOCAST else ()
        if match["form"] == "training":
            return _course("medium", match["context"], "own", *precision)
        return _course("medium", match["context"], "inference", *precision, *(("--uncached",) if precision else ()))
    if match := re.match(_NIUHUANG, name):
        form = "step" if match["form"] == "forward_and_backward" else "forward"
        mixed = ("--bf16",) if match["mixed"] else ()
        return "small_network_job.py", "--context", match["context"], "--form", form, *mixed
    return None


def _course(size: str, context: str, form: str, *more: str) -> tuple[str, ...]:
    return "course_job.py", "--size", size, "--context", context, "--form", form, "--steps", "3", *more


def results(files: Sequence[Path]) -> Iterator[tuple[str, Alignment]]:
    """Yield each rebuilt recording with its comparison."""
    profile = load_profile(DEVICE)
    for file in files:
        job = job_of(file.name)
        if job is not None:
            words = [sys.executable, str(JOBS / job[0]), *job[1:]]
            command = parse_command(words)
            yield file.name, compare_with_run(file, command, profile, 20, 600.0)


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    return exit_code("benchmarks.snapshots.rebuilt", lambda: _run(argv))


def _run(argv: Sequence[str]) -> None:
    parser = CommandParser(prog="python -m benchmarks.snapshots.rebuilt", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a directory of memory snapshots")
    parser.add_argument("--only", default="", metavar="PREFIX", help="of the names of recordings")
    arguments: argparse.Namespace = parser.parse_args(argv)
    files = sorted(path for path in arguments.data.iterdir() if path.name.startswith(arguments.only))
    print("| recording | allocations in order | allocated | reserved |\n| --- | --- | --- | --- |")
    for name, result in results(files):
        errors = f"{result.allocated_error:+.3%} | {result.reserved_error:+.3%}"
        short = name.split(".")[0]
        print(f"| {short} | {result.equal:,} of {result.recorded:,} | {errors} |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
