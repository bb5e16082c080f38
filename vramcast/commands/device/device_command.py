"""`vramcast device`: list and show device profiles, calibrate one to a GPU, and verify the virtual GPU against one."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vramcast.commands.exit_codes import CommandParser, exit_code, interrupt_on_sigterm
from vramcast.device.profiles import (
    DEFAULT_DEVICE,
    device_file,
    device_names,
    is_shipped,
    load_profile,
    read_device,
    read_rules,
)

_COLUMNS = ("name", "memory", "capability", "calibrated", "rules", "title")


def list_devices(arguments: argparse.Namespace) -> None:
    """List all device profiles."""
    entries = [_entry(name) for name in device_names()]
    if arguments.json:
        print(json.dumps(entries, indent=2))
        return
    table = [_COLUMNS, *map(_cells, entries)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _entry(name: str) -> dict[str, Any]:
    settings = read_device(name)
    keys = ("name", "title", "total_mib", "compute_capability", "calibrated_on", "rules", "cudnn_release")
    return {**{key: settings.get(key) for key in keys}, "shipped": is_shipped(name), "file": str(device_file(name))}


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a device in the order of `_COLUMNS`."""
    title = entry["title"] if entry["shipped"] else f"{entry['title']} ({entry['file']})"
    memory, calibrated = f"{entry['total_mib']} MiB", "no" if entry["calibrated_on"] is None else "yes"
    rules = f"cuDNN {entry['cudnn_release']}" if entry["cudnn_release"] else entry["rules"] or "its own"
    return entry["name"], memory, str(entry["compute_capability"]), calibrated, rules, title


def show_device(arguments: argparse.Namespace) -> None:
    """Print a device profile as YAML, with its workspace rules and their evidence."""
    from dataclasses import asdict

    import yaml

    from vramcast.virtual_gpu.canonical import without_defaults

    rules = read_device(arguments.name).get("rules")
    profile = load_profile(arguments.name)
    print(f"# {device_file(arguments.name)}")
    if rules:
        print(f"# rule set {rules}, evidence: {read_rules(rules).get('evidence')}")
    settings = {**asdict(profile), "convolution": [without_defaults(rule) for rule in profile.convolution]}
    print(yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120), end="")


def calibrate_device(arguments: argparse.Namespace) -> None:
    """Find workspace rules and constants of a GPU: from probes that are measured now, from rows, or from cuDNN."""
    from vramcast.commands.device.calibrate_command import run

    run(arguments)


def verify_device(arguments: argparse.Namespace) -> int:
    """Measure twenty golden specs on a GPU and on the virtual GPU; exit with 0 if they agree, with 1 if not."""
    from vramcast.commands.device.verify_command import run

    return run(arguments)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "list": list_devices,
    "show": show_device,
    "calibrate": calibrate_device,
    "verify": verify_device,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    interrupt_on_sigterm()
    return exit_code("vramcast device", lambda: _run(words))


def make_parser() -> CommandParser:
    """Return the parser of all commands."""
    parser = CommandParser(prog="vramcast device", description=__doc__)
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    subs = {
        name: parsers.add_parser(name, help=command.__doc__, description=command.__doc__)
        for name, command in COMMANDS.items()
    }
    for name, command in COMMANDS.items():
        subs[name].set_defaults(command=command)
    subs["list"].add_argument("--json", action="store_true")
    subs["show"].add_argument("name", metavar="NAME", help="a device, as `vramcast device list` names it")
    _add_calibrate(subs["calibrate"])
    _add_verify(subs["verify"])
    return parser


def _run(words: Sequence[str]) -> int | None:
    arguments = make_parser().parse_args(words)
    code: int | None = arguments.command(arguments)
    return code


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name of the new profile")
    parser.add_argument("--from-rows", metavar="PATH", help="measured rows: a build directory or a public table")
    parser.add_argument(
        "--from-cudnn", action="store_true",
        help="ask the installed cuDNN (9.8 or later) for workspaces; needs no GPU, and keeps the other constants",
    )  # fmt: skip
    parser.add_argument(
        "--from-snapshot", metavar="FILE", nargs="+", type=Path,
        help="memory snapshots of torch: workspaces, and the context where an allocation failed; needs no GPU",
    )  # fmt: skip
    parser.add_argument("--from-device", metavar="DEVICE", help="probe the virtual GPU with this profile, as a proof")
    parser.add_argument("--rows", type=int, default=40, help="number of rows to fit to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half", choices=("even", "odd"), help="fit to one half of the networks only")
    parser.add_argument("--start", metavar="DEVICE", help=f"starting point; default: NAME, else {DEFAULT_DEVICE}")
    parser.add_argument(
        "--from-scratch", action="store_true", help="drop the fitted constants and rules of that profile first"
    )
    parser.add_argument("--test", type=int, default=0, metavar="N", help="report the error on N other rows as well")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: in your own configuration directory")
    parser.add_argument("--force", action="store_true", help="replace an existing profile of yours")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="auto", help="a UUID, the beginning of one, or an index of nvidia-smi")
    parser.add_argument("--on-busy", choices=("refuse", "record"), default="refuse", help="if others use the GPU")
    parser.add_argument("--device", metavar="NAME", help="profile of the virtual GPU; default: by the GPU's name")
    parser.add_argument("--cap", action="store_true", help="run each spec again with its estimate as memory limit")
    parser.add_argument("--record", metavar="FILE", help="write the measured rows to a file")
    parser.add_argument("--recorded", metavar="FILE", help="read rows that --record wrote instead of using a GPU")
    parser.add_argument("--json", action="store_true")
