"""The console command: a thin front to `python -m dataset_builder` and its neighbours. Imports nothing heavy."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_COMMANDS = {
    "build": ("dataset_builder.__main__", "sample, filter, build and measure configurations"),
    "train": ("train.__main__", "train estimators, and evaluate them"),
    "classify": ("models.answering.command", "say how much memory a network takes, whether it fits, and what helps"),
    "serve": ("collocation.commands.serve", "answer schedulers and people over HTTP"),
    "place": ("collocation.commands.place", "choose a GPU for a job"),
    "observe": ("collocation.commands.observe", "tell a service what a job took"),
    "simulate": ("collocation.simulator.__main__", "run a trace of jobs on shared GPUs under estimators"),
    "evaluate": ("models.__main__", "hold estimates against measured rows"),
}

_PACKAGES = frozenset({"dataset_builder", "models", "train", "collocation", "conf"})


class _Own:
    """Finds vramcast's packages beside this file: users have some of the same names, before ours on the path."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or name not in _PACKAGES:
            return None
        return PathFinder.find_spec(name, [str(Path(__file__).resolve().parent)])


def _usage() -> str:
    lines = [f"  {name:10} {text}" for name, (_, text) in _COMMANDS.items()]
    return "usage: vramcast COMMAND ...\n\n" + "\n".join(lines) + "\n\nvramcast COMMAND --help tells more.\n"


def main() -> int:
    """Hand the words over to the package that carries them out."""
    sys.meta_path.insert(0, _Own)
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0
    if words[0] == "--version":
        from dataset_builder import __version__

        print(f"vramcast {__version__}")
        return 0
    if words[0] not in _COMMANDS:
        print(
            f"vramcast: expected one of {sorted(_COMMANDS)}, found {words[0]!r}: see vramcast --help", file=sys.stderr
        )
        return 2
    try:
        code: int = import_module(_COMMANDS[words[0]][0]).main(words[1:])
    except KeyboardInterrupt:  # while it was being imported; a command sees to its own end
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
