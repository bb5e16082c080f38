"""Job files of CARMA (.rad) and AEGIS-like schedulers (YAML), which state an estimate of the job."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from vramcast.dataset_builder.store.durable import replacing
from vramcast.errors import UserError

GPUMEMNET_LINE = 11
"""Of a .rad file: 1 environment, 2 command, 3 summary, 4 data set, 5 batch, 6 mode, 7 GPUs, 8 measured, 9 Horus,
10 FakeTensor, 11 GPUMemNet; the last four are MiB."""
_LEAST_LINES = 7
_LARGEST_MIB = 40_000
"""What CARMA's files say where an estimator has no answer: more than a card has free, so that the job runs alone."""


def write_rad(path: Path, need_mib: float | None, line: int = GPUMEMNET_LINE) -> None:
    """Write an estimate into a .rad file; None stands for a job that must run alone."""
    lines = _read(path).splitlines()
    if len(lines) < _LEAST_LINES:
        raise UserError(
            f"expected a .rad file of {_LEAST_LINES} lines or more, found {len(lines)} in {path}: name another"
        )
    if not _LEAST_LINES < line <= GPUMEMNET_LINE + 5:
        raise UserError(f"expected a line for estimates from 8, found {line}: the others say what the job is")
    lines += [""] * (line - len(lines))
    lines[line - 1] = str(_whole(need_mib))
    _replace(path, "\n".join(lines) + "\n")


def write_yaml(path: Path, need_mib: float | None, key: str) -> None:
    """Set a top-level key of a YAML file, and leave all else, comments too, as it is."""
    text = _read(path)
    found = _loaded(text)
    if found is None:
        raise UserError(f"expected a YAML mapping in {path}, found something else: name another file")
    if not re.fullmatch(r"[A-Za-z_][\w-]*", key):
        raise UserError(f"expected a plain word as the key, found {key!r}: change it")
    entry = f"{key}: {_whole(need_mib)}"
    pattern = re.compile(rf"^{re.escape(key)}[ \t]*:[^#\n]*?(?=[ \t]*(#.*)?$)", re.MULTILINE)
    if key in found:
        changed, count = pattern.subn(entry, text, count=1)
        if not count or isinstance(found[key], dict | list):
            raise UserError(f"expected {key} as a plain number in {path}, found another form: write 'key: number'")
    else:
        changed = f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{entry}\n"
    if _loaded(changed) != {**found, key: _whole(need_mib)}:
        raise UserError(
            f"expected a YAML file whose top level can be added to, found another in {path}: write it plainly"
        )
    _replace(path, changed)


def _loaded(text: str) -> dict[str, Any] | None:
    """The mapping that a text is, None where it is none."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return found if isinstance(found, dict) else None


def _whole(need_mib: float | None) -> int:
    return _LARGEST_MIB if need_mib is None else math.ceil(need_mib)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected a job file at {path}, found: {error}; check the path") from error


def _replace(path: Path, text: str) -> None:
    """At once: a scheduler may be reading it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
