"""What a baseline has learned, as a directory of JSON and safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dataset_builder.errors import UserError
from dataset_builder.store.durable import replacing

FORMAT_VERSION = 1
SETTINGS, ARRAYS = "baseline.json", "baseline.safetensors"

Array = NDArray[Any]


def write_state(
    directory: Path, name: str, settings: Mapping[str, Any] | None = None, arrays: Mapping[str, Array] | None = None
) -> None:
    """Write the settings and arrays of the baseline of that name; the file that `read_state` starts with comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    if arrays:
        with replacing(directory / ARRAYS) as temporary:
            save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, temporary)
    shapes = {key: [str(value.dtype), list(value.shape)] for key, value in (arrays or {}).items()}
    values = {"format": FORMAT_VERSION, "name": name, "settings": dict(settings or {}), "arrays": shapes}
    with replacing(directory / SETTINGS) as temporary:
        temporary.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="ascii")


def read_state(directory: Path, name: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The settings and arrays that `write_state` wrote for the baseline of that name."""
    values = _read_settings(directory)
    if values.get("format") != FORMAT_VERSION or values.get("name") != name:
        found = f"{values.get('name')!r} in format {values.get('format')!r}"
        raise UserError(
            f"expected the baseline {name!r} in format {FORMAT_VERSION} in {directory}, found {found}: fit it anew"
        )
    arrays = _read_arrays(directory / ARRAYS) if values["arrays"] else {}
    shapes = {key: [str(value.dtype), list(value.shape)] for key, value in arrays.items()}
    if shapes != values["arrays"]:
        raise UserError(f"expected the arrays {values['arrays']} in {directory}, found {shapes}: fit it anew")
    return values["settings"], arrays


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"expected a baseline at {path}, found: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"expected a baseline in {path}, found no JSON ({error}): fit it anew") from error
    keys = {"format", "name", "settings", "arrays"}
    if not isinstance(values, dict) or values.keys() != keys:
        raise UserError(f"expected a baseline with the keys {sorted(keys)} in {path}, found other JSON: fit it anew")
    return values


def _read_arrays(path: Path) -> dict[str, Array]:
    try:
        found: dict[str, Array] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"expected the arrays of a baseline in {path}, found: {error}; fit it anew") from error
    return found
