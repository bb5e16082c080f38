"""Run directories: never overwritten, and self-contained, so that an interrupted run resumes from its directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.train.configuration import Configuration, read_configuration

CONFIG, METRICS = "config.yaml", "metrics.json"


@dataclass(frozen=True)
class Run:
    """A run and its directory."""

    configuration: Configuration
    directory: Path

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write figures atomically."""
        with replacing(self.directory / name) as path:
            path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read figures."""
        values: dict[str, Any] = json.loads((self.directory / name).read_text())
        return values

    @property
    def finished(self) -> bool:
        """Return whether the run is complete: it writes its metrics last."""
        return (self.directory / METRICS).exists()


def start_run(configuration: Configuration) -> Run:
    """Make a new run directory and store the configuration in it."""
    root = Path(configuration.run.root)
    stamp = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{configuration.run.name}"
    directory = _make_new(root, stamp)
    values = OmegaConf.create({**configuration.values})
    (directory / CONFIG).write_text(OmegaConf.to_yaml(values))
    return Run(configuration, directory)


def _make_new(root: Path, name: str) -> Path:
    for number in range(1, 1_000):
        directory = root / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if not directory.is_dir():
                break
            continue
        return directory
    raise UserError(f"expected room for a new directory {name} in {root}, found none: use run.root=DIR")


def resume_run(directory: Path, overrides: list[str]) -> Run:
    """Open an interrupted run with its stored configuration."""
    others = [word for word in overrides if not word.startswith("run.resume=")]
    if others:
        raise UserError(
            f"expected run.resume=DIR alone, found {others} with it: a run resumes with its own configuration"
        )
    run = Run(read_configuration(directory / CONFIG), directory)
    if run.finished:
        raise UserError(f"expected an interrupted run in {directory}, found {METRICS}: the run is complete")
    return run
