"""`vramcast completion SHELL`: prints a script that completes commands, options and device names in a shell.

The script is made once from the parsers of all commands, so that completion itself starts no Python.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.device.profiles import device_names
from vramcast.errors import UserError

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_PARSERS: Mapping[str, str] = {
    "classify": "classify.classify_command",
    "solve": "classify.solve_command",
    "run": "run.run_command",
    "check": "check.check_command",
    "snapshot": "snapshot.snapshot_command",
    "build": "build.build_subcommands",
    "device": "device.device_command",
    "evaluate": "evaluate_command",
    "serve": "collocation.serve_command",
    "place": "collocation.place_command",
    "observe": "collocation.observe_command",
    "simulate": "collocation.simulate_command",
    "completion": "completion_command",
}
"""Modules with a `make_parser`; `train` has none, because Hydra reads its words."""
_FILES = ("FILE", "PATH")
_DIRECTORIES = ("DIR",)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return exit_code("vramcast completion", lambda: _print(make_parser().parse_args(argv).shell))


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog="vramcast completion",
        description="Print a script that completes commands, options and device names.",
        epilog="For bash: vramcast completion bash > ~/.local/share/bash-completion/completions/vramcast",
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    return parser


def _print(shell: str) -> None:
    shtab = _shtab()
    print(shtab.complete(whole_parser(shtab), shell=shell))


def _shtab() -> ModuleType:
    try:
        return import_module("shtab")
    except ImportError as error:
        raise UserError(f"expected the library shtab, found: {error}; pip install 'vramcast[completion]'") from error


def whole_parser(shtab: Any) -> argparse.ArgumentParser:
    """Return one parser with those of all commands, which complete device names and paths."""
    parser = argparse.ArgumentParser(prog="vramcast")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, module in _PARSERS.items():
        own = import_module(f"vramcast.commands.{module}").make_parser()
        commands.add_parser(name, help=_first_line(own.description))
        commands.choices[name] = own
    _add_options(commands.choices["check"], (commands.choices["classify"], commands.choices["run"]))
    for own in commands.choices.values():
        _complete(own, shtab)
    commands.add_parser("train", help="train estimators and evaluate them")
    return parser


def _add_options(parser: argparse.ArgumentParser, others: Sequence[argparse.ArgumentParser]) -> None:
    """Add the options of commands that another one passes its words on to."""
    for action in (action for other in others for action in other._actions if action.option_strings):
        if not parser._option_string_actions.keys() & set(action.option_strings):
            parser._add_action(action)


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].rpartition("`: ")[2]


def _complete(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Add to the actions of a parser what a shell should offer for their values."""
    names = device_names()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete(below, shtab)
        elif "--device" in action.option_strings and action.choices is None:
            action.choices = names
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
