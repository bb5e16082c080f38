"""`task=search`: an Optuna study over an estimator's configuration; the same command resumes it."""

import vramcast.train._torchvision  # noqa: F401

# isort: split
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import OmegaConf
from optuna.trial import FrozenTrial, Trial, TrialState

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.models.estimators.classifiers import NetworkClassifier, PreparedData, prepare
from vramcast.train.configuration import Configuration, check_configuration
from vramcast.train.experiment import load_parts
from vramcast.train.fitting import LightningFitter
from vramcast.virtual_gpu.canonical import content_hash

_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_DECIDED_BY = "configuration"


class Pruning(Callback):
    """A callback that reports losses to a trial and prunes it."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the validation loss of the epoch."""
        self.trial.report(float(trainer.callback_metrics["validation_loss"]), trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def search(configuration: Configuration) -> optuna.Study:
    """Run the remaining trials and print the best settings."""
    if not configuration.members:
        raise UserError("expected an estimator with networks for task=search, found none: use estimator=mlp")
    factors = dict(factors_of(configuration.search))
    changed(configuration.values, dict.fromkeys(factors, 0))  # fail on unknown settings before rows are built
    fixed = sorted({"features", "bucket_mib", "seed"} & {name.split(".")[0] for name in factors})
    if fixed:
        raise UserError(
            f"expected settings of estimator and trainer in search, found {fixed}: losses would not be comparable"
        )
    study = _open(configuration)
    parts = load_parts(configuration)
    data = prepare(configuration.network, parts.train, parts.validation)
    left = configuration.task["trials"] - len(study.get_trials(states=_DONE))
    if left > 0:
        study.optimize(lambda trial: _loss(trial, configuration, factors, data), n_trials=left, show_progress_bar=True)
    _report(study, configuration)
    return study


def _open(configuration: Configuration) -> optuna.Study:
    task = configuration.task
    path = Path(task["storage"])
    path.parent.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=f"sqlite:///{path}",
        study_name=task["study"],
        pruner=optuna.pruners.MedianPruner(task["startup_trials"], task["warmup_epochs"]),
        load_if_exists=True,
    )
    _check_same(study, configuration)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):  # left by a killed process
        study.tell(trial.number, state=TrialState.FAIL)
    # With the same seed, a resumed study would draw the same trials again.
    seed = configuration.seed + len(study.trials)
    study.sampler = optuna.samplers.TPESampler(n_startup_trials=task["startup_trials"], seed=seed)
    return study


def _check_same(study: optuna.Study, configuration: Configuration) -> None:
    """Raise UserError if the study belongs to another configuration: their losses are not comparable."""
    values = {key: value for key, value in configuration.values.items() if key not in ("task", "run", "logger")}
    decided = content_hash(values)
    if study.user_attrs.setdefault(_DECIDED_BY, decided) != decided:
        raise UserError(
            f"expected the study {study.study_name} to have this configuration, found another in "
            f"{configuration.task['storage']}: use task.study=OTHER"
        )
    study.set_user_attr(_DECIDED_BY, decided)


def _loss(trial: Trial, configuration: Configuration, factors: Mapping[str, Any], data: PreparedData) -> float:
    """Train one member with the trial's settings and return its best validation loss."""
    chosen = {key: suggest(trial, key, factor) for key, factor in factors.items()}
    try:
        tried = check_configuration(changed(configuration.values, chosen))
    except UserError as error:  # such as a width that the heads do not divide
        raise optuna.TrialPruned(str(error)) from error
    with tempfile.TemporaryDirectory() as directory:
        fitter = LightningFitter(tried.trainer, Path(directory), lambda _: [], [Pruning(trial)], bar=False)
        NetworkClassifier(tried.network, fitter).fit_prepared(data)
    return min(epoch["validation_loss"] for epochs in fitter.history.values() for epoch in epochs)


def factors_of(search: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the varied settings by their dotted names."""
    for key, value in search.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            raise UserError(f"expected search.{name} to have one of choice, int, float, found {value!r}: change it")
        if {"choice", "int", "float"} & value.keys():
            yield name, _checked(name, value)
        else:
            yield from factors_of(value, f"{name}.")
    if not search and not prefix:
        raise UserError("expected settings to vary in search, found none: see conf/search")


def _checked(name: str, factor: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = next(kind for kind in ("choice", "int", "float") if kind in factor)
    values, unknown = factor[kind], sorted(factor.keys() - {kind, "log"})
    good = isinstance(values, list) and (bool(values) if kind == "choice" else len(values) == 2)
    good = good and (kind == "choice" or (all(map(_is_number, values)) and values[0] <= values[1]))
    if unknown or not good or not isinstance(factor.get("log", False), bool):
        raise UserError(
            f"expected search.{name} to be such as {{int: [1, 4]}}, {{float: [0.001, 0.1], log: true}} or "
            f"{{choice: [32, 64]}}, found {dict(factor)}: change it"
        )
    return factor


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def suggest(trial: Trial, name: str, factor: Mapping[str, Any]) -> Any:
    """Let a trial suggest a value of a factor."""
    if "choice" in factor:
        return trial.suggest_categorical(name, factor["choice"])
    if "int" in factor:
        return trial.suggest_int(name, *factor["int"], log=factor.get("log", False))
    return trial.suggest_float(name, *factor["float"], log=factor.get("log", False))


def changed(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with some settings, given by dotted names, replaced."""
    config = OmegaConf.create({**values})
    for name, value in settings.items():
        if OmegaConf.select(config, name) is None:
            raise UserError(f"expected settings of the run in search, found {name!r}: rename it")
        OmegaConf.update(config, name, value)
    result: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    return result


def _report(study: optuna.Study, configuration: Configuration) -> None:
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    pruned = len(study.get_trials(states=(TrialState.PRUNED,)))
    storage = Path(configuration.task["storage"])
    if not complete:
        raise UserError(
            f"expected a completed trial in the study {study.study_name}, found {pruned} pruned: raise task.trials"
        )
    best: FrozenTrial = study.best_trial
    words = " ".join(f"{name}={_short(value)}" for name, value in best.params.items())
    with replacing(storage.with_suffix(".yaml")) as path:
        path.write_text(OmegaConf.to_yaml({"validation_loss": best.value, "settings": best.params}))
    print(
        f"{len(complete)} trials complete, {pruned} pruned; stored in {storage}; the same command continues the study"
    )
    print(f"best validation loss {best.value:.4f} (trial {best.number}): {words}")
    sys.stdout.flush()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
