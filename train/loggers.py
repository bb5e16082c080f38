"""Lightning's loggers: CSV tables, TensorBoard, MLflow."""

import vramcast.train._torchvision  # noqa: F401

# isort: split
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger

from vramcast.errors import UserError, check_choice

_LIBRARIES = {"csv": (), "tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow",)}
"""The libraries of each logger, of which one is needed."""
_SETTINGS: Mapping[str, set[str]] = {"csv": set(), "tensorboard": set(), "mlflow": {"tracking_uri", "experiment"}}


def make_loggers(settings: Mapping[str, Any]) -> Callable[[Path], list[Logger]]:
    """Validate the settings and return a function that makes the loggers of a member's directory."""
    for name, options in settings.items():
        check_choice("logger", name, _LIBRARIES)
        _check_library(name)
        if not isinstance(options, Mapping):
            raise UserError(f"expected the settings of logger={name}, found {options!r}: use logger={name}")
        unknown = sorted(options.keys() - _SETTINGS[name])
        if unknown:
            raise UserError(f"expected only {sorted(_SETTINGS[name])} in logger={name}, found {unknown}: remove them")
    return lambda directory: [_make(name, options, directory) for name, options in settings.items()]


def _check_library(name: str) -> None:
    needed = _LIBRARIES[name]
    if needed and not any(find_spec(library) for library in needed):
        raise UserError(
            f"expected the library of logger={name}, found none of {list(needed)}: "
            f"pip install 'vramcast[{name}]', or use logger=csv"
        )


def _make(name: str, options: Mapping[str, Any], directory: Path) -> Logger:
    """Make a logger. Lightning numbers each attempt as a new version, so resuming deletes nothing."""
    if name == "csv":
        return CSVLogger(directory, "csv")
    if name == "tensorboard":
        return TensorBoardLogger(directory, "tensorboard")
    run_name = "-".join(directory.parts[-3:])
    return MLFlowLogger(options["experiment"], run_name, options["tracking_uri"])
