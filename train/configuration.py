"""Configuration of a run: Hydra composes `conf/train.yaml`, this module validates the result."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vramcast.dataset_builder.composition import Command, compose_config
from vramcast.errors import UserError, check_choice, check_count, suggestion
from vramcast.files.yaml_text import check_aliases
from vramcast.models.estimators.classifiers import NetworkSettings
from vramcast.train.settings import DataSettings, RunSettings, TrainerSettings, check_split
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.canonical import canonical_json, from_mapping

GROUPS = ("data", "estimator", "executor", "family", "features", "logger", "search", "task", "trainer")
KEYS = (*GROUPS, "bucket_mib", "risk", "run", "seed", "split")
COMMAND = Command("train", "vramcast train", "run", KEYS, "data=gpumemnet family=cnn estimator=transformer")
TASKS = {
    "fit": {"figures"},
    "kfold": {"folds", "figures"},
    "search": {"trials", "study", "storage", "startup_trials", "warmup_epochs"},
    "release": {"only", "out"},
}
"""The settings of each task, apart from its name."""
SIMULATION = "simulation"
"""The estimator without networks: simulations with calibrated errors."""
_SEEDS = 2**32


@dataclass(frozen=True)
class Configuration:
    """The validated configuration of one run."""

    task: Mapping[str, Any]
    data: DataSettings
    network: NetworkSettings
    members: int
    """Networks of the ensemble; 0 for the calibrated simulation."""
    trainer: TrainerSettings
    split: Mapping[str, float]
    risk: float
    """How often the safe bucket may be too low."""
    run: RunSettings
    executor: Mapping[str, Any]
    logger: Mapping[str, Any]
    search: Mapping[str, Any]
    values: Mapping[str, Any]
    """The whole configuration as plain values, as stored in the run directory."""

    @property
    def bucket_bytes(self) -> int:
        """Return the width of the buckets."""
        return self.network.bucket_mib * MIB

    @property
    def seed(self) -> int:
        """Return the seed of the split, the weights and the order of the rows."""
        return self.network.seed


def configure(overrides: Sequence[str]) -> Configuration:
    """Return the configuration that overrides of `conf/train.yaml` describe."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise UserError(f"expected KEY=VALUE, found {word!r}: see vramcast train --help")
    values = plain(compose_config(COMMAND, overrides))
    if isinstance(values.get("run"), dict):
        values["run"].setdefault("command", command_of(overrides))
    return check_configuration(values)


def command_of(overrides: Sequence[str]) -> str:
    """Return the command that repeats a run, without paths of this machine."""
    portable = [word for word in overrides if not word.startswith(("run.", "data.cache=", "data.rows=", "executor"))]
    words = ["data.path=DIR" if word.startswith("data.path=") else word for word in portable]
    return " ".join(["vramcast train", *map(shlex.quote, words)])


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain values."""
    values: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    return values


def read_configuration(path: Path) -> Configuration:
    """Read the configuration of a run directory."""
    try:
        check_aliases(path)
        values = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        cause = f"no {path.name} ({error.strerror})"
        raise UserError(f"expected the directory of a run, found {cause} in {path.parent}: check the path") from error
    except UserError:
        raise
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(f"expected a configuration in {path}, found: {error}; start a new run") from error
    return check_configuration(values)  # type: ignore[arg-type]


def check_configuration(values: Mapping[str, Any]) -> Configuration:
    """Validate plain values; raise UserError if they describe no run."""
    _check_keys("a run", values, set(KEYS))
    for key in ("task", "data", "features", "estimator", "trainer", "executor", "run", "split"):
        if not isinstance(values[key], Mapping):
            raise UserError(f"expected {key} to be settings, found {values[key]!r}: see vramcast train --cfg")
    try:
        canonical_json(values)
    except ValueError as error:
        raise UserError("expected finite numbers in a run, found nan or inf: change them") from error
    check_count("seed", values["seed"], least=0)
    if values["seed"] >= _SEEDS:
        raise UserError(f"expected seed to be below {_SEEDS}, found {values['seed']}: change it")
    check_split(values["split"])
    if not isinstance(values["risk"], float) or not 0 < values["risk"] < 1:
        raise UserError(f"expected risk to be between 0 and 1, found {values['risk']!r}: change it")
    network, members = _network(values)
    return Configuration(
        task=_task(values["task"]),
        data=from_mapping(DataSettings, values["data"], "the data"),
        network=network,
        members=members,
        trainer=from_mapping(TrainerSettings, values["trainer"], "the trainer"),
        split=values["split"],
        risk=values["risk"],
        run=from_mapping(RunSettings, values["run"], "run"),
        executor=values["executor"],
        logger=values["logger"] or {},
        search=values["search"] or {},
        values=values,
    )


def _task(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    check_choice("task.name", settings.get("name"), TASKS)
    _check_keys(f"the task {settings['name']}", settings, {"name", *TASKS[settings["name"]]})
    for name in ("folds", "trials", "startup_trials"):
        if name in settings:
            check_count(f"task.{name}", settings[name], least=2 if name == "folds" else 1)
    return settings


def _network(values: Mapping[str, Any]) -> tuple[NetworkSettings, int]:
    """Return the settings of the members and their number: none for the calibrated simulation."""
    settings = {**values["estimator"]}
    members = settings.pop("members", None)
    simulation = settings.get("network") == SIMULATION
    check_count("estimator.members", members, least=0 if simulation else 1)
    if simulation:
        del settings["network"]
        if members or values["features"].get("name") != "full":
            raise UserError(
                f"expected features=full and no members for estimator={SIMULATION}, found "
                f"{values['features'].get('name')!r} and {members}: change them"
            )
    allowed = {item.name for item in fields(NetworkSettings)} - {"features", "bucket_mib", "seed"}
    _check_keys("the estimator", settings, allowed, required=False)
    shared = {"features": values["features"].get("name"), "bucket_mib": values["bucket_mib"], "seed": values["seed"]}
    return from_mapping(NetworkSettings, {**settings, **shared}, "the estimator"), members


def _check_keys(owner: str, values: Mapping[str, Any], allowed: set[str], required: bool = True) -> None:
    unknown = sorted(map(str, values.keys() - allowed))
    if unknown:
        hint = suggestion(unknown[0], sorted(allowed), "remove them")
        raise UserError(f"expected only the keys {sorted(allowed)} in {owner}, found {unknown}: {hint}")
    missing = sorted(allowed - values.keys())
    if missing and required:
        raise UserError(f"expected the keys {sorted(allowed)} in {owner}, found no {missing}: do not delete them")
