"""Checks the configuration that Hydra composes for a command line, and makes a build from it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from vramcast.dataset_builder.backends import Backend
from vramcast.dataset_builder.backends.static import StaticBackend
from vramcast.dataset_builder.composition import Command, compose_config
from vramcast.dataset_builder.executors import Executor, LocalExecutor, SerialExecutor
from vramcast.dataset_builder.pipeline import Build
from vramcast.dataset_builder.samplers import make_sampler
from vramcast.dataset_builder.samplers.mixed import MixedSampler
from vramcast.dataset_builder.space import SpaceMixture, parse_space
from vramcast.device.profiles import load_profile, with_rules
from vramcast.errors import UserError, check_choice, check_count, check_flag
from vramcast.virtual_gpu.canonical import canonical_json, from_mapping

if TYPE_CHECKING:
    from vramcast.dataset_builder.backends.cuda.backend import CudaBackend

_KEYS = ("backend", "device", "executor", "family", "n", "out", "sampler", "seed", "space")
_BUILD = Command("build", "vramcast build", "build", _KEYS, "family=cnn n=500")
_NOT_IN_HEADER = ("executor", "out", "family")
"""Keys that may differ when a build is resumed, because they change no row (the space has its own family)."""
_EXECUTOR_SETTINGS = {
    "local": {"workers", "timeout_seconds"},
    "ray": {"address", "cpus", "gpus", "retries", "timeout_seconds", "in_flight", "wait_seconds", "runtime_env"},
    "serial": set[str](),
}
_SEEDS = 2**32
"""Number of seeds of numpy's RandomState."""


def compose_build(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of a build from `conf/build.yaml` and the overrides."""
    return compose_config(_BUILD, overrides)


def settings_of(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that determine rows, as plain values for the header of the journal."""
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
    families = [item.removeprefix("family=") for item in overrides if item.startswith("family=")]
    family = settings["space"].get("family")
    if families and families[-1] != family:
        raise UserError(f"expected a space of the family {families[-1]}, found one of {family}: drop space= or family=")
    for space in (settings["space"], *settings["space"].get("parts", {}).values()):
        if isinstance(space.get("factors"), dict):
            # as pairs, because factors are drawn in this order and JSON objects are unordered
            space["factors"] = [list(pair) for pair in space["factors"].items()]
    backend = settings["backend"]
    if backend["name"] == "static" or (backend["name"] == "cuda" and not backend.get("verify_cap")):
        del settings["device"]  # shapes do not depend on the device, and a real GPU needs no profile
    elif isinstance(settings["device"], dict):
        settings["device"] = with_rules(settings["device"])
    return {key: value for key, value in settings.items() if key not in _NOT_IN_HEADER}


def output_directory(config: DictConfig) -> Path:
    """Return the output directory of a build."""
    if not isinstance(config.out, str) or not config.out:
        raise UserError(f"expected out to be a directory, found {config.out!r}: use out=DIR")
    return Path(config.out)


def make_build(settings: Mapping[str, Any], out: Path) -> Build:
    """Make a build from the settings of a command line or of a journal's header."""
    check_count("n", settings["n"])
    check_count("seed", settings["seed"], least=0)
    if settings["seed"] >= _SEEDS:
        raise UserError(f"expected seed to be below {_SEEDS}, found {settings['seed']}: change it")
    space, sampler = parse_space(settings["space"]), make_sampler(**settings["sampler"])
    return Build(
        space=space,
        sampler=MixedSampler(sampler) if isinstance(space, SpaceMixture) else sampler,
        backend=make_backend(settings),
        n=settings["n"],
        seed=settings["seed"],
        out=out,
        settings=settings,
    )


def make_backend(settings: Mapping[str, Any]) -> Backend:
    """Make the backend; each is imported only when it is used, because it needs torch or a driver."""
    options = dict(settings["backend"])
    name = options.pop("name", None)
    check_choice("backend", name, ("static", "virtual", "cuda", "swept"))
    if name == "cuda":
        return _make_cuda(options, settings)
    if name == "swept":
        return _make_swept(options, settings["device"])
    unknown = sorted(options.keys() - ({"allocator"} if name == "virtual" else set()))
    if unknown:
        raise UserError(f"expected other settings of the backend {name}, found {unknown}: remove them")
    return StaticBackend() if name == "static" else make_virtual(settings["device"], options.get("allocator"))


def make_virtual(profile: Mapping[str, Any], allocator: str | None = None) -> Backend:
    """Make the virtual GPU of a device profile."""
    from vramcast.dataset_builder.backends.virtual import VirtualBackend  # noqa: PLC0415
    from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions  # noqa: PLC0415
    from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

    return VirtualBackend(parse_profile(profile), AllocatorOptions.parse(allocator or ""))


def _make_swept(options: Mapping[str, Any], device: Mapping[str, Any]) -> Backend:
    """Make the virtual GPU that sweeps batch sizes, on the device of the build and others by name."""
    from vramcast.dataset_builder.backends.swept import SweptBackend, SweptSettings  # noqa: PLC0415
    from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

    chosen = from_mapping(SweptSettings, options, "the settings of the backend swept")
    profiles = [parse_profile(device), *(load_profile(name) for name in chosen.devices)]
    return SweptBackend(profiles, chosen)


def _make_cuda(options: dict[str, Any], settings: Mapping[str, Any]) -> Backend:
    verify_cap = options.pop("verify_cap", False)
    check_flag("backend.verify_cap", verify_cap)
    return make_cuda(options, make_virtual(settings["device"], options.get("allocator")) if verify_cap else None)


def make_cuda(settings: Mapping[str, Any], estimator: Backend | None = None) -> "CudaBackend":
    """Make the backend of a real GPU; with an estimator, it also runs specs with the estimate as memory limit."""
    from vramcast.dataset_builder.backends.cuda.backend import CudaBackend, CudaSettings  # noqa: PLC0415

    return CudaBackend(from_mapping(CudaSettings, settings, "the settings of the backend cuda"), estimator)


def make_executor(config: DictConfig, backend: Backend) -> Executor:
    """Make the executor of a build."""
    return executor_of(OmegaConf.to_container(config.executor), backend)  # type: ignore[arg-type]


def executor_of(settings: Mapping[str, Any], backend: Backend) -> Executor:
    """Make an executor of `conf/executor`; by default with one worker per device of the backend, else per core."""
    settings = dict(settings)
    name = settings.pop("name", None)
    check_choice("executor", name, _EXECUTOR_SETTINGS)
    allowed = _EXECUTOR_SETTINGS[name]
    if settings.keys() - allowed:
        raise UserError(
            f"expected only {sorted(allowed)} in executor={name}, found {sorted(settings)}: remove the others"
        )
    if name == "serial":
        backend.lanes()  # raises on a machine that cannot measure, before anything is written
        return SerialExecutor()
    if name == "ray":
        return _ray_executor(settings, backend)
    workers = settings.pop("workers", None)
    if workers is not None:
        check_count("executor.workers", workers)
    executor = LocalExecutor(1, **settings)
    _check_time(executor.timeout_seconds, backend.longest_seconds)
    lanes = backend.lanes()
    executor.workers = workers or (len(os.sched_getaffinity(0)) if lanes is None else len(lanes))
    return executor


def _ray_executor(settings: dict[str, Any], backend: Backend) -> Executor:
    """Make the Ray executor; Ray is imported here, because it is an extra and takes a second."""
    from vramcast.dataset_builder.executors.on_ray import RayExecutor  # noqa: PLC0415

    if settings.get("gpus") is None:
        settings["gpus"] = int(backend.name == "cuda")
    executor = RayExecutor(**settings)
    _check_time(executor.timeout_seconds, backend.longest_seconds)
    return executor


def _check_time(limit_seconds: float | None, needed_seconds: float | None) -> None:
    """Check that the backend times out first: it knows how to end its processes, and records the evidence."""
    if limit_seconds is not None and needed_seconds is not None and limit_seconds <= needed_seconds:
        raise UserError(
            f"expected executor.timeout_seconds above the {needed_seconds:g} s that the backend allows for a spec, "
            f"found {limit_seconds:g}: raise it, or lower backend.timeout_seconds"
        )
