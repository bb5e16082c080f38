"""The `vramcast` command. Maps a command to its module; imports nothing heavy."""

import sys
from collections.abc import Sequence
from importlib import import_module

from vramcast.quick_imports import quick_imports
from vramcast.version import __version__

COMMANDS = {
    "classify": (
        "classify.classify_command",
        "say how much memory a network takes and whether it fits",
    ),
    "solve": ("classify.solve_command", "find the largest batch, the fewest GPUs or the cheapest device that fits"),
    "run": ("run.run_command", "run a training script on a virtual GPU and say how much memory it takes"),
    "check": ("check.check_command", "fail if a job does not fit, or takes more than a limit or than before"),
    "snapshot": ("snapshot.snapshot_command", "read a memory snapshot of torch: contents, failure, remedies"),
    "build": ("build.build_command", "sample, filter, build and measure configurations"),
    "device": ("device.device_command", "list, show, calibrate and verify device profiles"),
    "completion": ("completion_command", "print a script that completes words in a shell"),
    "train": ("train_command", "train estimators and evaluate them"),
    "evaluate": ("evaluate_command", "compare estimates with measured rows"),
    "serve": ("collocation.serve_command", "answer schedulers and people over HTTP"),
    "place": ("collocation.place_command", "choose a GPU for a job"),
    "observe": ("collocation.observe_command", "tell a service what a job took"),
    "simulate": ("collocation.simulate_command", "run a trace of jobs on shared GPUs under estimators"),
}


def _usage() -> str:
    lines = [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: vramcast COMMAND ...\n\n" + "\n".join(lines) + "\n\nRun `vramcast COMMAND --help` for more.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0
    if words[0] == "--version":
        print(f"vramcast {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from vramcast.errors import suggestion

        hint = suggestion(words[0], COMMANDS, "see vramcast --help")
        print(f"vramcast: expected one of {sorted(COMMANDS)}, found {words[0]!r}: {hint}", file=sys.stderr)
        return 2
    try:
        with quick_imports():
            command = import_module(f"vramcast.commands.{COMMANDS[words[0]][0]}")
        code: int = command.main(words[1:])
    except KeyboardInterrupt:  # raised during the import; commands handle their own interrupts
        return 130
    return code
