"""The command after `--`: which interpreter runs it, and what that interpreter should run."""

import ast
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from vramcast.errors import UserError
from vramcast.simulation.scripts.shell_scripts import SHELLS, training_command

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
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NOTEBOOK = ".ipynb"
_NOTEBOOK_TOOLS = ("jupyter", "jupyter-nbconvert", "jupyter-execute", "papermill", "ipython")
_DEEPSPEED = (
    "expected python, torchrun or accelerate launch, found the launcher deepspeed: vramcast does not run its engine; "
    "use FSDP or DDP here, or vramcast classify --parallel zero1, zero2 or zero3"
)
_UV_WITH_VALUE = (
    "--with", "--with-editable", "--with-requirements", "--extra", "--group", "--only-group", "--python", "-p",
    "--package", "--directory", "--project", "--env-file", "--index", "--index-url", "--default-index",
)  # fmt: skip
"""Options of `uv run` that take a value."""


@dataclass(frozen=True)
class Program:
    """What an interpreter runs."""

    kind: str
    """'file', 'module', 'code' or 'notebook', or a launcher: 'torchrun', 'accelerate'."""
    name: str
    arguments: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...] = ()
    """Of a notebook, each with its value in Python."""

    @property
    def title(self) -> str:
        """Return a short name for a report."""
        if self.kind in _LAUNCHERS.values():
            return next((Path(word).name for word in self.arguments if word.endswith(".py")), Path(self.name).name)
        if self.kind == "code":
            return "-c"
        return Path(self.name).name if self.kind in ("file", "notebook") else self.name

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read a program as `to_json` wrote it."""
        parameters = tuple((name, value) for name, value in values["parameters"])
        return cls(values["kind"], values["name"], tuple(values["arguments"]), parameters)


class ScriptCommand(NamedTuple):
    """An interpreter with its own options, and the program that it runs."""

    interpreter: str
    flags: tuple[str, ...]
    program: Program
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that the command sets."""
    directory: str | None = None
    """The working directory, None for that of this process."""


def parse_command(words: Sequence[str]) -> ScriptCommand:
    """Return what the words of a command line mean."""
    if not words:
        raise UserError(f"expected a command after '--', such as {_FORM}, found none: add it")
    wrapper = _wrapper_of(words)
    if wrapper is not None:
        return wrapper(list(words))
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


def _wrapper_of(words: Sequence[str]) -> Callable[[list[str]], ScriptCommand] | None:
    """Return what reads a command that starts another one, by its first word."""
    first = words[0]
    name = Path(first).name
    if _ASSIGNMENT.fullmatch(first) or (name == "env" and len(words) > 1):
        return _with_variable
    if name in SHELLS or first.endswith(".sh"):
        return _of_shell
    if first.endswith(_NOTEBOOK) or name in _NOTEBOOK_TOOLS:
        return _of_notebook
    return {"uv": _of_uv, "deepspeed": _of_deepspeed}.get(name)


def _with_variable(words: list[str]) -> ScriptCommand:
    """Return a command after NAME=VALUE."""
    if Path(words[0]).name == "env":
        return parse_command(words[1:])
    name, _, value = words[0].partition("=")
    with _variable(name, value):  # a shell script after it may read it
        parsed = parse_command(words[1:])
    return parsed._replace(variables=((name, value), *parsed.variables))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _of_deepspeed(words: list[str]) -> ScriptCommand:
    raise UserError(_DEEPSPEED)


def _starts_python(word: str) -> bool:
    """Return True for the first word of a command that may train."""
    name = Path(word).name
    return _is_python(word) or name in _LAUNCHERS or name in ("uv", "deepspeed", "papermill") or word.endswith(".py")


def _of_shell(words: list[str]) -> ScriptCommand:
    """Return the command that a shell script starts."""
    if Path(words[0]).name in SHELLS:
        words = words[1:]
    while words and words[0].startswith("-"):  # -e, -x
        words = words[1:]
    if not words:
        raise UserError("expected a shell script after the shell, found none: name it")
    started = training_command(Path(words[0]), words[1:], _starts_python)
    before = Path.cwd()
    try:
        os.chdir(started.directory)
        parsed = parse_command(started.words)
    except OSError as error:
        raise UserError(f"expected the directory {started.directory} of {words[0]}, found: {error}; make it") from error
    finally:
        os.chdir(before)
    return parsed._replace(
        variables=(*started.variables.items(), *parsed.variables), directory=parsed.directory or str(started.directory)
    )


def _of_uv(words: list[str]) -> ScriptCommand:
    """Return the command of `uv run` in the environment of the project: uv itself could change it."""
    if words[1:2] != ["run"]:
        raise UserError(f"expected uv run, found {shlex.join(words)!r}: name the script")
    words = words[2:]
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-m", "--module"):
            words = ["python", "-m", *words]
            break
        if word in _UV_WITH_VALUE and words:
            words.pop(0)
        if word == "--":
            break
    if not words:
        raise UserError("expected a command after uv run, found none: name the script")
    interpreter = _interpreter_of_project()
    launched = words if not _is_python(words[0]) else words[1:]
    if words[0].endswith(".py") or _is_python(words[0]):
        return parse_command([interpreter, *launched])
    beside = Path(interpreter).with_name(words[0])
    return parse_command([str(beside) if beside.exists() else words[0], *words[1:]])


def _interpreter_of_project() -> str:
    """Return the interpreter that `uv run` takes: of the project's environment, or of the active one."""
    own = os.environ.get("UV_PROJECT_ENVIRONMENT", ".venv")
    roots = [folder / own for folder in (Path.cwd(), *Path.cwd().parents)]
    active = [Path(os.environ["VIRTUAL_ENV"])] if os.environ.get("VIRTUAL_ENV") else []
    for root in (*roots, *active):
        if (root / "bin" / "python").exists():
            return str(root / "bin" / "python")
    raise UserError(f"expected the environment of the project ({own}) for uv run, found none: run uv sync first")


def _of_notebook(words: list[str]) -> ScriptCommand:
    """Return the notebook that nbconvert, papermill or IPython would execute."""
    notebooks = [word for word in words if word.endswith(_NOTEBOOK)]
    if not notebooks:
        raise UserError(f"expected a notebook (.ipynb), found {shlex.join(words)!r}: name it")
    if not Path(notebooks[0]).is_file():
        raise UserError(f"expected a notebook at {notebooks[0]}, found none: check the path")
    tool = shutil.which(words[0]) if not words[0].endswith(_NOTEBOOK) else None
    interpreter = (_shebang(tool) if tool else None) or sys.executable
    pairs = [words[at + 1 : at + 3] for at, word in enumerate(words) if word in ("-p", "-r", "--parameters")]
    if not all(len(pair) == 2 and pair[0].isidentifier() for pair in pairs):
        raise UserError(f"expected parameters such as -p name value, found {shlex.join(words)!r}: write them like that")
    parameters = tuple((name, _in_python(value)) for name, value in pairs)
    return ScriptCommand(interpreter, (), Program("notebook", notebooks[0], (), parameters))


def _in_python(text: str) -> str:
    """Return the value of a parameter as papermill reads it: a number, a truth value or a text."""
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    return repr(value)


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
