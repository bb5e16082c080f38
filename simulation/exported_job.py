"""An exported job: a simulation as a file that goes where the code cannot, with hashes of the code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.jobs.code_files import code_hashes
from vramcast.jobs.spec import LayerTable
from vramcast.simulation.result import Peaks, Simulation
from vramcast.version import __version__
from vramcast.virtual_gpu.canonical import without_defaults
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

FORMAT = "vramcast_job"
"""The key by which a file is known; its value is the version of the form."""
_FIGURES = (
    "requested_bytes", "allocated_bytes", "reserved_bytes", "device_used_bytes", "trial_bytes", "tried_bytes",
)  # fmt: skip
_NOTE = "simulated where the code is, and exported by vramcast {}"


def exported_job(target: str, simulation: Simulation, code: Path | None) -> dict[str, Any]:
    """Return what an export holds: layers, training, peaks by device, and hashes of a Python file and its imports."""
    return {
        FORMAT: 1,
        "version": __version__,
        "target": target,
        "training": without_defaults(simulation.training),
        "family": simulation.family,
        "table": simulation.table.to_json(),
        "peaks": {device: _peaks_json(peaks) for device, peaks in simulation.peaks.items()},
        "notes": list(simulation.notes),
        "code": code_hashes(code, Path.cwd()) if code else {},
    }


def write_export(path: Path, job: Mapping[str, Any]) -> None:
    """Write an export durably."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(job, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"expected to write {path}, found: {error.strerror}; name another place") from error


def check_export_path(path: Path | None) -> None:
    """Raise if an export cannot be written, before the simulation starts."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"expected a file in a directory for --export, found {path}: name another")


def read_export(values: Mapping[str, Any]) -> tuple[str, Simulation]:
    """Return the target and the simulation of an export."""
    try:
        simulation = Simulation(
            table=LayerTable.from_json(values["table"]),
            training=TrainingSetup(**values["training"]),
            peaks={device: _peaks(item) for device, item in values["peaks"].items()},
            family=values.get("family"),
            notes=(*values.get("notes", ()), _NOTE.format(values.get("version"))),
        )
        return str(values["target"]), simulation
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"expected an exported job, found one without or with a wrong {error}: export it again"
        ) from error


def simulated_on(simulation: Simulation, devices: set[str]) -> None:
    """Raise if an export has no peaks on some devices."""
    if missing := sorted(devices - simulation.peaks.keys()):
        raise UserError(
            f"expected an export with the device {missing[0]}, found {sorted(simulation.peaks)}: export it again with "
            f"--device {missing[0]}"
        )


def _peaks_json(peaks: Peaks) -> dict[str, Any]:
    """Return the peaks on a device; without the unbounded ones where they are the same."""
    values = {"bounded": _measurement_json(peaks.bounded)}
    if peaks.unbounded is not None and peaks.unbounded != peaks.bounded:
        values["unbounded"] = _measurement_json(peaks.unbounded)
    return values


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    figures = {name: value for name in _FIGURES if (value := getattr(measurement, name)) is not None}
    return {
        "status": measurement.status.value,
        **figures,
        "breakdown": dict(measurement.breakdown),
        "notes": list(measurement.notes),
    }


def _peaks(values: Mapping[str, Any]) -> Peaks:
    bounded = _measurement(values["bounded"])
    return Peaks(bounded, _measurement(values["unbounded"]) if values.get("unbounded") else bounded)


def _measurement(values: Mapping[str, Any]) -> Measurement:
    return Measurement(**{**values, "status": Status(values["status"]), "notes": tuple(values.get("notes", ()))})
