"""Shell scripts that start a training: read, never run, because a shell would change files of the user.

Known are assignments, `export`, `cd`, and parameters in `$NAME`, `${NAME}` and `${NAME:-default}`; a command
substitution is run only for a few commands that change nothing.
"""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vramcast.errors import UserError

SHELLS = ("bash", "sh", "zsh", "dash")
_READING = ("date", "pwd", "hostname", "whoami", "nproc", "basename", "dirname", "seq", "echo", "realpath")
"""Commands of a substitution that change nothing."""
_KEYWORDS = ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "(", "time", "exec", "nohup", "numactl")
"""Words before a command."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\$(?:([A-Za-z_]\w*|[@*#?$]|\d)|\{([A-Za-z_]\w*|[@*\d])(?:(\[[@*]\])|(:?[-=])([^}]*))?\})")
_INSIDE = r"\\.|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}"
"""Parts that a quotation mark does not end: an escaped letter, and a command substitution."""
_QUOTED = re.compile(rf"'([^']*)'|\"((?:{_INSIDE}|[^\"\\])*)\"|((?:{_INSIDE}|[^'\"])+)", re.DOTALL)
_SEPARATORS = (";", "&", "|", "\n")
_SECONDS = 5


@dataclass
class ShellCommand:
    """A command of a shell script with all that the script has set up for it."""

    words: list[str]
    variables: dict[str, str]
    directory: Path


@dataclass
class _State:
    path: Path
    arguments: Sequence[str]
    directory: Path
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)


def training_command(path: Path, arguments: Sequence[str], starts: Callable[[str], bool]) -> ShellCommand:
    """Return the one command of a shell script that `starts` recognises by its first word."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"expected a shell script at {path}, found: {error}; check the path") from error
    state = _State(path, arguments, Path.cwd())
    commands = [command for item in _commands(text) if (command := _follow(item, state, starts)) is not None]
    if len(commands) != 1:
        lines = "; ".join(" ".join(item.words)[:100] for item in commands) or "none"
        raise UserError(
            f"expected one command in {path} that starts Python, found {len(commands)} ({lines}): run the one that "
            "trains after '--'"
        )
    return commands[0]


def _commands(text: str) -> list[list[str]]:
    """Return the words of each simple command, with their quotes."""
    commands: list[list[str]] = [[]]
    word, at, quoted = "", 0, ""
    text = text.replace("\\\r\n", "").replace("\\\n", "")
    depth = 0
    in_array = False

    def end() -> None:
        nonlocal word
        if word:
            commands[-1].append(word)
        word = ""

    while at < len(text):
        mark = text[at]
        if mark == "\\" and quoted != "'":
            word += text[at : at + 2]
            at += 2
            continue
        if quoted:
            quoted = "" if mark == quoted and not depth else quoted
        elif mark in "'\"" and not depth:
            quoted = mark
        if quoted != "'" and text.startswith("$(", at):
            depth += 1
        if depth and mark == ")":
            depth -= 1
        elif not quoted and not depth:
            if mark == "#" and not word:
                at = text.find("\n", at) if "\n" in text[at:] else len(text)
                continue
            redirects = word.endswith((">", "<")) or text[at - 1 : at] == ">" or text[at + 1 : at + 2] == ">"
            in_array = (in_array and mark != ")") or (mark == "(" and word.endswith("="))
            if mark in _SEPARATORS and not in_array and not (mark == "&" and redirects):
                end()
                commands.append([])
                at += 1
                continue
            if mark.isspace():
                end()
                at += 1
                continue
        word += mark
        at += 1
    end()
    return [command for command in commands if command]


def _follow(words: list[str], state: _State, starts: Callable[[str], bool]) -> ShellCommand | None:
    """Apply a command to the state, or return it if it is the one that starts the training."""
    words = _without_redirections(words)
    while words and words[0] in _KEYWORDS:
        words = words[1:]
    local: dict[str, str] = {}
    if words and words[0] in ("export", "declare", "readonly", "local"):
        words = [word for word in words[1:] if not word.startswith("-")]
    if words and words[0] == "env":
        words = words[1:]
    array = _array(words)
    if array is not None:
        state.arrays[array[0]] = [item for word in array[1] for item in _expanded(word, state)]
        return None
    while words and (assigned := _ASSIGNMENT.match(words[0])):
        local[assigned[1]] = " ".join(_expanded(assigned[3], state, split=False))
        words = words[1:]
    if not words:
        state.variables.update(local)
        return None
    if words[0] == "cd" and len(words) == 2:
        state.directory = state.directory / " ".join(_expanded(words[1], state, split=False))
        return None
    first = _expanded(words[0], state)
    if not first or not starts(first[0]):
        return None
    full = [item for word in words for item in _expanded(word, state)]
    return ShellCommand(full, {**state.variables, **local}, state.directory)


def _array(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the name and the words of `NAME=(...)`."""
    if not words or not (assigned := _ASSIGNMENT.match(words[0])) or not assigned[3].startswith("("):
        return None
    inside = [assigned[3][1:], *words[1:]]
    inside[-1] = inside[-1].removesuffix(")")
    return assigned[1], [word for word in inside if word]


def _without_redirections(words: Sequence[str]) -> list[str]:
    words_alone: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif redirected := re.fullmatch(r"[\d&]*(?:>>?|<)(&[\d-])?(.*)", word, re.DOTALL):
            skip = not redirected[1] and not redirected[2]
        else:
            words_alone.append(word)
    return words_alone


def _expanded(word: str, state: _State, *, split: bool = True) -> list[str]:
    """Return the words that a word stands for: unquoted parameters are split at spaces."""
    if word == '"$@"':
        return list(state.arguments)
    if array := re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', word):
        return state.arrays.get(array[1], [])
    text, splits = "", [""]
    for kind, part in _parts(word):
        text = part if kind == "'" else _substituted(part, state)
        if kind or not split:
            splits[-1] += text
            continue
        first, *others = re.split(r"\s+", text)
        splits[-1] += first
        splits += others
    quoted = any(kind for kind, _ in _parts(word))
    return [item for item in splits if item or quoted]


def _parts(word: str) -> list[tuple[str, str]]:
    """Return the parts of a word with the quotes around each: a single one, a double one, or none."""
    parts: list[tuple[str, str]] = []
    for match in _QUOTED.finditer(word):
        if match[1] is not None:
            parts.append(("'", match[1]))
        else:
            kind, part = ('"', match[2]) if match[2] is not None else ("", match[3])
            parts.append((kind, part))
    return parts


def _substituted(text: str, state: _State) -> str:
    """Return a text with its parameters and command substitutions replaced, and its backslashes removed."""

    def parameter(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        value = _value(name, state)
        if value or match[4] is None:
            return value
        return " ".join(_expanded(match[5], state, split=False))

    text = re.sub(r"\$\(((?:[^()]|\([^()]*\))*)\)", lambda match: _output(match[1], state), text)
    return re.sub(r"\\(.)", r"\1", _PARAMETER.sub(parameter, text), flags=re.DOTALL)


def _value(name: str, state: _State) -> str:
    if name in "@*":
        return " ".join(state.arguments)
    if name == "#":
        return str(len(state.arguments))
    if name.isdigit():
        place = int(name)
        return str(state.path) if place == 0 else state.arguments[place - 1] if place <= len(state.arguments) else ""
    if name == "BASH_SOURCE":
        return str(state.path)
    if name == "PWD":
        return str(state.directory)
    return state.variables.get(name, os.environ.get(name, ""))


def _output(text: str, state: _State) -> str:
    """Return the output of a command substitution."""
    steps = [_without_redirections(words) for words in _commands(text)]
    directory = state.directory
    for words in steps:
        full = [item for word in words for item in _expanded(word, state)]
        if full[:1] == ["cd"] and len(full) == 2:
            directory = directory / full[1]
        elif full[:1] == ["pwd"]:
            return str(directory.resolve())
        elif full and full[0] in _READING and len(steps) == 1:
            done = subprocess.run(full, capture_output=True, text=True, timeout=_SECONDS, cwd=directory, check=False)
            return done.stdout.rstrip("\n")
        else:
            raise UserError(
                f"expected a shell script whose values are known without running it, found $({text}) in {state.path}: "
                "run the command that trains after '--'"
            )
    return ""
