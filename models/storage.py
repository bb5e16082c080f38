"""An estimator on disk: weights as safetensors, everything else as JSON, each held to a hash. No pickle."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.virtual_gpu.canonical import content_hash

FORMAT = "vramcast-estimator"
FORMAT_VERSION = 3
WEIGHTS, ESTIMATOR = "weights.safetensors", "estimator.json"


@dataclass(frozen=True)
class State:
    """The learned state: arrays by name, and settings as JSON values."""

    settings: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    def part(self, name: str) -> "State":
        """Return the state that `joined` stored under a name."""
        prefix = f"{name}."
        arrays = {key.removeprefix(prefix): value for key, value in self.arrays.items() if key.startswith(prefix)}
        return State(self.settings[name], arrays)


def joined(parts: Mapping[str, State]) -> State:
    """Join several states into one."""
    arrays = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.arrays.items()}
    return State({name: part.settings for name, part in parts.items()}, arrays)


def write_state(directory: Path, kind: str, state: State) -> None:
    """Write an estimator into a directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"expected a directory to write at {directory}, found: {error.strerror}; choose another"
        ) from error
    weights = save({name: np.ascontiguousarray(value) for name, value in state.arrays.items()})
    record = {"format": FORMAT, "version": FORMAT_VERSION, "kind": kind, "settings": dict(state.settings)}
    _write(directory, record, {WEIGHTS: weights})


def attach(directory: Path, files: Mapping[str, bytes]) -> None:
    """Add files to a saved estimator, which are verified when it is read."""
    _write(directory, _read_record(directory), files)


def _write(directory: Path, record: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    digests = {**record.get("files", {}), **{name: sha256(data).hexdigest() for name, data in files.items()}}
    sealed = _sealed({**record, "files": digests})
    for name, data in {**files, ESTIMATOR: sealed}.items():  # the record last: a directory without it is no estimator
        with replacing(directory / name) as temporary:
            temporary.write_bytes(data)


def read_kind(directory: Path) -> str:
    """Return the kind of estimator in a directory."""
    return str(_read_record(directory)["kind"])


def read_state(directory: Path, kind: str) -> State:
    """Read a directory that `write_state` wrote; raise a UserError if it is damaged, newer or of another kind."""
    record = _read_record(directory)
    if record["kind"] != kind:
        raise UserError(
            f"expected an estimator of the kind {kind} in {directory}, found {record['kind']}: name another"
        )
    contents = {name: _read_bytes(directory / name) for name in record["files"]}
    for name, digest in record["files"].items():
        if sha256(contents[name]).hexdigest() != digest:
            raise _damaged(directory, f"that {name} is not the file that was written")
    try:
        return State(record["settings"], load(contents[WEIGHTS]))
    except (SafetensorError, KeyError) as error:
        raise _damaged(directory, f"no tensors in {WEIGHTS} ({error})") from error


def _sealed(record: Mapping[str, Any]) -> bytes:
    return (json.dumps({**record, "content": content_hash(record)}, indent=1, allow_nan=False) + "\n").encode("ascii")


def _read_record(directory: Path) -> dict[str, Any]:
    try:
        record = json.loads(_read_bytes(directory / ESTIMATOR))
    except ValueError as error:
        raise _damaged(directory, f"no JSON in {ESTIMATOR} ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(
            f"expected an estimator in {directory}, found another kind of file in {ESTIMATOR}: name another"
        )
    if record.get("version") != FORMAT_VERSION:
        raise UserError(
            f"expected an estimator of format {FORMAT_VERSION} in {directory}, found {record.get('version')!r}: "
            "install the vramcast that wrote it, or train again"
        )
    if record.pop("content", None) != content_hash(record):
        raise _damaged(directory, f"that {ESTIMATOR} was changed after it was written")
    return record


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        there = sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else "no such directory"
        raise UserError(
            f"expected an estimator with {path.name} in {path.parent}, found {there}: check the path"
        ) from error


def _damaged(directory: Path, what: str) -> UserError:
    return UserError(f"expected a sound estimator in {directory}, found {what}: fetch or train it again")
