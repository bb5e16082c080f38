"""From the words of a command line to a build: Hydra composes `conf/`, this module checks what comes out."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from vramcast.dataset_builder.composition import Command, compose_config
from vramcast.dataset_builder.devices import with_rules
from vramcast.dataset_builder.executors import Executor, LocalExecutor, SerialExecutor
from vramcast.dataset_builder.measure import Backend
from vramcast.dataset_builder.measure.static import StaticBackend
from vramcast.dataset_builder.pipeline import Build
from vramcast.dataset_builder.samplers import make_sampler
from vramcast.dataset_builder.space import parse_space
from vramcast.errors import UserError, check_choice, check_count, check_flag
from vramcast.virtual_gpu.records import canonical_json, from_mapping

if TYPE_CHECKING:
    from vramcast.dataset_builder.measure.cuda.backend import CudaBackend

_KEYS = ("backend", "device", "executor", "family", "n", "out", "sampler", "seed", "space")
_BUILD = Command("build", "vramcast build", "build", _KEYS, "family=cnn n=500")
_OUTSIDE_THE_HEADER = ("executor", "out", "family")
"""What may differ when a build is resumed, since it changes no row (the family is the space's)."""
_EXECUTOR_SETTINGS = {
    "local": {"workers", "timeout_seconds"},
    "ray": {"address", "cpus", "gpus", "retries", "timeout_seconds", "in_flight", "wait_seconds", "runtime_env"},
    "serial": set[str](),
}
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
    backend = settings["backend"]
    if backend["name"] == "static" or (backend["name"] == "cuda" and not backend.get("verify_cap")):
        del settings["device"]  # shapes are the same on every card, and a card needs no profile
    elif isinstance(settings["device"], dict):
        settings["device"] = with_rules(settings["device"])
    return {key: value for key, value in settings.items() if key not in _OUTSIDE_THE_HEADER}


def output_directory(config: DictConfig) -> Path:
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
    """What measures the rows; each is imported only where it is asked for, since it needs torch or a driver."""
    chosen = dict(settings["backend"])
    name = chosen.pop("name", None)
    check_choice("backend", name, ("static", "virtual", "cuda"))
    if name == "cuda":
        return _make_cuda(chosen, settings)
    unknown = sorted(chosen.keys() - ({"allocator"} if name == "virtual" else set()))
    if unknown:
        raise UserError(f"expected no such settings of the backend {name}, found {unknown}: remove them")
    return StaticBackend() if name == "static" else make_virtual(settings["device"], chosen.get("allocator"))


def make_virtual(profile: Mapping[str, Any], allocator: str | None = None) -> Backend:
    """The virtual GPU with the settings of a device profile."""
    from vramcast.dataset_builder.measure.virtual import VirtualBackend  # noqa: PLC0415
    from vramcast.virtual_gpu.allocator import AllocatorOptions  # noqa: PLC0415
    from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

    return VirtualBackend(parse_profile(profile), AllocatorOptions.parse(allocator or ""))


def _make_cuda(chosen: dict[str, Any], settings: Mapping[str, Any]) -> Backend:
    verify_cap = chosen.pop("verify_cap", False)
    check_flag("backend.verify_cap", verify_cap)
    return make_cuda(chosen, make_virtual(settings["device"], chosen.get("allocator")) if verify_cap else None)


def make_cuda(settings: Mapping[str, Any], estimator: Backend | None = None) -> "CudaBackend":
    """A real GPU; the estimator's figures, if there is one, are tried as limits."""
    from vramcast.dataset_builder.measure.cuda.backend import CudaBackend, CudaSettings  # noqa: PLC0415

    return CudaBackend(from_mapping(CudaSettings, settings, "the settings of the backend cuda"), estimator)


def make_executor(config: DictConfig, backend: Backend) -> Executor:
    """Where the build runs."""
    return executor_of(OmegaConf.to_container(config.executor), backend)  # type: ignore[arg-type]


def executor_of(settings: Mapping[str, Any], backend: Backend) -> Executor:
    """The executor of `conf/executor`; by default with a worker for each device of the backend, else each core."""
    settings = dict(settings)
    name = settings.pop("name", None)
    check_choice("executor", name, _EXECUTOR_SETTINGS)
    known = _EXECUTOR_SETTINGS[name]
    if settings.keys() - known:
        raise UserError(
            f"expected only {sorted(known)} in executor={name}, found {sorted(settings)}: remove the others"
        )
    if name == "serial":
        backend.lanes()  # refuses a machine that cannot measure before anything is written
        return SerialExecutor()
    if name == "ray":
        return _ray_executor(settings, backend)
    asked = settings.pop("workers", None)
    if asked is not None:
        check_count("executor.workers", asked)
    executor = LocalExecutor(1, **settings)
    _check_time(executor.timeout_seconds, backend.longest_seconds)
    lanes = backend.lanes()
    executor.workers = asked or (len(os.sched_getaffinity(0)) if lanes is None else len(lanes))
    return executor


def _ray_executor(settings: dict[str, Any], backend: Backend) -> Executor:
    """Ray is imported only where it is asked for: it takes a second, and is an extra."""
    from vramcast.dataset_builder.executors.on_ray import RayExecutor  # noqa: PLC0415

    if settings.get("gpus") is None:
        settings["gpus"] = int(backend.name == "cuda")
    executor = RayExecutor(**settings)
    _check_time(executor.timeout_seconds, backend.longest_seconds)
    return executor


def _check_time(limit_seconds: float | None, needed_seconds: float | None) -> None:
    """Leave it to the backend to end what it started: it knows what that is, and keeps the evidence."""
    if limit_seconds is not None and needed_seconds is not None and limit_seconds <= needed_seconds:
        raise UserError(
            f"expected executor.timeout_seconds to be over the {needed_seconds:g} s that the backend gives a spec, "
            f"found {limit_seconds:g}: raise it, or lower backend.timeout_seconds"
        )
