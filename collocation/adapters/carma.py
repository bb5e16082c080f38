"""Job files of CARMA (.rad) and similar schedulers (YAML), which contain an estimate of the job's memory."""

import math
import re
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.files.yaml_text import parse_yaml

GPUMEMNET_LINE = 11
"""The line of a .rad file: 1 environment, 2 command, 3 summary, 4 data set, 5 batch, 6 mode, 7 GPUs, 8 measured,
9 Horus, 10 FakeTensor, 11 GPUMemNet; the last four are MiB."""
_LEAST_LINES = 7
_LARGEST_MIB = 40_000
"""CARMA's value for a job without an estimate: more than is free on a GPU, so that the job runs alone."""


def write_rad(path: Path, need_mib: float | None, line: int = GPUMEMNET_LINE) -> None:
    """Write an estimate into a .rad file; None means that the job must run alone."""
    lines = _read(path).split("\n")  # not splitlines(), which counts a form feed in a command as the end of a line
    if not lines[-1]:
        lines.pop()
    if len(lines) < _LEAST_LINES:
        raise UserError(
            f"expected a .rad file of {_LEAST_LINES} lines or more, found {len(lines)} in {path}: name another"
        )
    if not _LEAST_LINES < line <= GPUMEMNET_LINE + 5:
        raise UserError(f"expected a line for estimates from 8, found {line}: the other lines describe the job")
    lines += [""] * (line - len(lines))
    lines[line - 1] = str(_whole(need_mib))
    _replace(path, "\n".join(lines) + "\n")


def write_yaml(path: Path, need_mib: float | None, key: str) -> None:
    """Set a top-level key of a YAML file, and leave everything else as it is, also comments."""
    text = _read(path)
    mapping = _loaded(text, path)
    if mapping is None:
        raise UserError(f"expected a YAML mapping in {path}, found something else: name another file")
    if not re.fullmatch(r"[A-Za-z_][\w-]*", key):
        raise UserError(f"expected a plain word as the key, found {key!r}: change it")
    entry = f"{key}: {_whole(need_mib)}"
    pattern = re.compile(rf"^{re.escape(key)}[ \t]*:[^#\n]*?(?=[ \t]*(#.*)?$)", re.MULTILINE)
    if key in mapping:
        changed, count = pattern.subn(entry, text, count=1)
        if not count or isinstance(mapping[key], dict | list):
            raise UserError(f"expected {key} as a plain number in {path}, found another form: write 'key: number'")
    else:
        changed = f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{entry}\n"
    if _loaded(changed, path) != {**mapping, key: _whole(need_mib)}:
        raise UserError(
            f"expected a YAML file whose top level can be added to, found another in {path}: write it plainly"
        )
    _replace(path, changed)


def _loaded(text: str, path: Path) -> dict[str, Any] | None:
    """Return the mapping in a text, or None if there is another value."""
    try:
        value = parse_yaml(text, path)
    except UserError:
        return None
    return value if isinstance(value, dict) else None


def _whole(need_mib: float | None) -> int:
    return _LARGEST_MIB if need_mib is None else math.ceil(need_mib)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected a job file at {path}, found: {error}; check the path") from error


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, because a scheduler may be reading it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
