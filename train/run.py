"""Run directories: made once, never written over, and enough by themselves to go on with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from vramcast.dataset_builder.store.durable import replacing
from vramcast.errors import UserError
from vramcast.train.configuration import Configuration, read_configuration

CONFIG, METRICS = "config.yaml", "metrics.json"


@dataclass(frozen=True)
class Run:
    """A run and its directory."""

    configuration: Configuration
    directory: Path

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep figures, whole or not at all."""
        with replacing(self.directory / name) as path:
            path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Figures that were kept."""
        found: dict[str, Any] = json.loads((self.directory / name).read_text())
        return found

    @property
    def finished(self) -> bool:
        """The metrics are the last that a run writes."""
        return (self.directory / METRICS).exists()


def begin(configuration: Configuration) -> Run:
    """A new directory with the configuration in it."""
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


def take_up(directory: Path, overrides: list[str]) -> Run:
    """A run that was stopped, with the configuration that it began with."""
    others = [word for word in overrides if not word.startswith("run.resume=")]
    if others:
        raise UserError(f"expected run.resume=DIR alone, found {others} beside it: a run goes on as it began")
    run = Run(read_configuration(directory / CONFIG), directory)
    if run.finished:
        raise UserError(f"expected a run that was stopped in {directory}, found one with {METRICS}: it is complete")
    return run
