"""From the words of a command line to a build: Hydra composes `conf/`, this module checks what comes out."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dataset_builder.composition import Command, compose_config
from dataset_builder.errors import UserError, check_choice, check_count
from dataset_builder.executors import Executor, LocalExecutor, SerialExecutor
from dataset_builder.measure import Backend
from dataset_builder.measure.static import StaticBackend
from dataset_builder.pipeline import Build
from dataset_builder.samplers import make_sampler
from dataset_builder.schema import canonical_json
from dataset_builder.space import parse_space

_KEYS = ("backend", "device", "executor", "family", "n", "out", "sampler", "seed", "space")
_BUILD = Command("build", "vramcast build", "build", _KEYS, "family=cnn n=500")
_OUTSIDE_THE_HEADER = ("executor", "out", "family")
"""What may differ when a build is resumed, since it changes no row (the family is the space's)."""
_SEEDS = 2**32
"""How many numpy's RandomState tells apart."""


def compose_build(overrides: Sequence[str]) -> DictConfig:
    """The configuration of a build, `conf/build.yaml` changed by the overrides."""
    return compose_config(_BUILD, overrides)


def settings_of(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The part of a configuration that decides rows, as plain values: what a journal's header keeps."""
    settings: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    unknown, missing = sorted(settings.keys() - set(_KEYS)), sorted(set(_KEYS) - settings.keys())
    if unknown:
        raise UserError(f"expected only the keys {list(_KEYS)} in a build, found {unknown}: remove them")
    if missing:
        raise UserError(f"expected the keys {list(_KEYS)} in a build, found no {missing}: do not delete them")
    for key in ("space", "sampler", "backend", "executor"):
        if not isinstance(settings[key], dict) or "name" not in settings[key]:
            raise UserError(f"expected {key} to be settings with a name, found {settings[key]!r}: use {key}=NAME")
    try:
        canonical_json(settings)
    except ValueError as error:
        raise UserError("expected finite numbers in a build, found nan or inf: change them") from error
    asked = [item.removeprefix("family=") for item in overrides if item.startswith("family=")]
    family = settings["space"].get("family")
    if asked and asked[-1] != family:
        raise UserError(f"expected a space of the family {asked[-1]}, found one of {family}: drop space= or family=")
    if isinstance(settings["space"].get("factors"), dict):
        # as pairs: the order of the factors is the order of the draws, and a JSON object has none
        settings["space"]["factors"] = [list(pair) for pair in settings["space"]["factors"].items()]
    if settings["backend"].get("name") == "static":
        del settings["device"]  # shapes are the same on every card
    return {key: value for key, value in settings.items() if key not in _OUTSIDE_THE_HEADER}


def out_of(config: DictConfig) -> Path:
    """The directory of a build."""
    if not isinstance(config.out, str) or not config.out:
        raise UserError(f"expected out to be a directory, found {config.out!r}: use out=DIR")
    return Path(config.out)


def make_build(settings: Mapping[str, Any], out: Path) -> Build:
    """The build that settings describe: those of a command line, or of a journal's header."""
    check_count("n", settings["n"])
    check_count("seed", settings["seed"], least=0)
    if settings["seed"] >= _SEEDS:
        raise UserError(f"expected seed to be below {_SEEDS}, found {settings['seed']}: change it")
    return Build(
        space=parse_space(settings["space"]),
        sampler=make_sampler(**settings["sampler"]),
        backend=make_backend(settings),
        n=settings["n"],
        seed=settings["seed"],
        out=out,
        settings=settings,
    )


def make_backend(settings: Mapping[str, Any]) -> Backend:
    """What measures the rows; the virtual GPU is imported only where it is asked for, since it needs torch."""
    chosen = dict(settings["backend"])
    name = chosen.pop("name", None)
    check_choice("backend", name, ("static", "virtual"))
    unknown = sorted(chosen.keys() - ({"allocator"} if name == "virtual" else set()))
    if unknown:
        raise UserError(f"expected no such settings of the backend {name}, found {unknown}: remove them")
    if name == "static":
        return StaticBackend()
    from dataset_builder.measure.virtual.allocator import AllocatorOptions  # noqa: PLC0415
    from dataset_builder.measure.virtual.backend import VirtualBackend  # noqa: PLC0415
    from dataset_builder.measure.virtual.profile import parse_profile  # noqa: PLC0415

    options = AllocatorOptions.parse(chosen.get("allocator") or "")
    return VirtualBackend(parse_profile(settings["device"]), options)


def load_device(name: str) -> dict[str, Any]:
    """The settings of a device profile in `conf/device`."""
    settings: dict[str, Any] = settings_of(compose_build([f"device={name}", "backend=virtual"]), [])["device"]
    return settings


def make_executor(config: DictConfig) -> Executor:
    """Where the build runs."""
    return executor_of(OmegaConf.to_container(config.executor))  # type: ignore[arg-type]


def executor_of(settings: Mapping[str, Any]) -> Executor:
    """The executor of `conf/executor` that settings describe."""
    settings = dict(settings)
    name = settings.pop("name", None)
    check_choice("executor", name, ("local", "serial"))
    known = {"workers", "timeout_seconds"} if name == "local" else set()
    if settings.keys() - known:
        raise UserError(
            f"expected only {sorted(known)} in executor={name}, found {sorted(settings)}: remove the others"
        )
    if name == "serial":
        return SerialExecutor()
    if settings.get("workers") is None:
        settings["workers"] = len(os.sched_getaffinity(0))
    check_count("executor.workers", settings["workers"])
    return LocalExecutor(**settings)
