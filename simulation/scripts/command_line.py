"""The command after `--`: which interpreter runs it, and what that interpreter should run."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from vramcast.errors import UserError

_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
}
_WITH_VALUE = ("-W", "-X")
_FORM = "python train.py, python -m my.module, torchrun train.py or accelerate launch train.py"


@dataclass(frozen=True)
class Program:
    """What an interpreter runs."""

    kind: str
    """'file', 'module' or 'code', or a launcher: 'torchrun', 'accelerate'."""
    name: str
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return a short name for a report."""
        if self.kind in _LAUNCHERS.values():
            return next((Path(word).name for word in self.arguments if word.endswith(".py")), Path(self.name).name)
        return Path(self.name).name if self.kind == "file" else self.name

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read a program as `to_json` wrote it."""
        return cls(values["kind"], values["name"], tuple(values["arguments"]))


class ScriptCommand(NamedTuple):
    """An interpreter with its own options, and the program that it runs."""

    interpreter: str
    flags: tuple[str, ...]
    program: Program


def parse_command(words: Sequence[str]) -> ScriptCommand:
    """Return what the words of a command line mean."""
    if not words:
        raise UserError(f"expected a command after '--', such as {_FORM}, found none: add it")
    first, rest = words[0], list(words[1:])
    if _is_python(first):
        return ScriptCommand(_resolved(first), *_python_program(rest))
    if first.endswith(".py"):
        return ScriptCommand(sys.executable, (), _file(first, rest))
    path, launcher = shutil.which(first), _LAUNCHERS.get(Path(first).name)
    interpreter = _shebang(path) if path else None
    if launcher is not None and (interpreter or path is None):
        return ScriptCommand(interpreter or sys.executable, (), _launched(first, rest))
    if path is None or interpreter is None:
        raise UserError(f"expected a Python program ({_FORM}), found {shlex.join(words)!r}: name the script")
    return ScriptCommand(interpreter, (), Program("file", path, tuple(rest)))


def _launched(name: str, words: list[str]) -> Program:
    """Return the program of a launcher without the sub-command of `accelerate launch`."""
    launcher = Path(name).name
    if launcher in ("accelerate", "accelerate.commands.accelerate_cli"):
        if words[:1] != ["launch"]:
            raise UserError(f"expected accelerate launch, found {shlex.join([launcher, *words])!r}: launch a script")
        words = words[1:]
    return Program(_LAUNCHERS[launcher], name, tuple(words))


def _is_python(word: str) -> bool:
    name = Path(word).name
    return name.removeprefix("python").replace(".", "").isdigit() or name == "python"


def _resolved(word: str) -> str:
    path = shutil.which(word)
    if path is not None:
        return path
    if word == "python":
        return sys.executable
    raise UserError(f"expected an interpreter, found {word!r}, which is not on the path: name another")


def _python_program(words: list[str]) -> tuple[tuple[str, ...], Program]:
    options: list[str] = []
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-m", "-c"):
            if not words:
                raise UserError(f"expected a name after python {word}, found none: add it")
            name = words.pop(0)
            if word == "-c":
                return tuple(options), Program("code", name, tuple(words))
            if name in _LAUNCHERS:
                return tuple(options), _launched(name, words)
            return tuple(options), Program("module", name, tuple(words))
        options.append(word)
        if word in _WITH_VALUE and words:
            options.append(words.pop(0))
    if not words:
        raise UserError(f"expected a script, as in {_FORM}, found an interpreter alone: name the script")
    return tuple(options), _file(words[0], words[1:])


def _file(name: str, arguments: list[str]) -> Program:
    if not Path(name).exists():
        raise UserError(f"expected a Python file at {name}, found none: check the path")
    return Program("file", name, tuple(arguments))


def _shebang(path: str) -> str | None:
    """Return the interpreter that the first line of a console script names."""
    with Path(path).open("rb") as file:
        line = file.readline(4096)
        following = file.readline(4096)
    if not line.startswith(b"#!"):
        return None
    words = line[2:].decode(errors="replace").split()
    if words and words[0].endswith("/sh") and b"exec" in following:  # pip's form for long paths
        words = following.decode(errors="replace").replace("'''exec'", "").replace('"', "").split()
    if words and Path(words[0]).name == "env":
        words = words[1:]
    return shutil.which(words[0]) if words and "python" in Path(words[0]).name else None
