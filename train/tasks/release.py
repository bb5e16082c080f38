"""`task=release`: rebuild the checkpoints that `conf/release` lists, each by a run of its own."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vramcast.dataset_builder.devices import CONF
from vramcast.errors import UserError, check_choice
from vramcast.models.comparison import Report, text_table
from vramcast.train.configuration import Configuration, configure
from vramcast.train.experiment import ESTIMATOR, examples_for
from vramcast.train.run import begin
from vramcast.train.tasks.fit import CHECKPOINT, fit_on, stored_split

RELEASES = CONF / "release"


@dataclass(frozen=True)
class Release:
    """A checkpoint to build."""

    name: str
    title: str
    overrides: tuple[str, ...]


def release(configuration: Configuration, overrides: Sequence[str]) -> None:
    """Build all that are asked for; what else the command line says holds for each of them."""
    shared = [word for word in overrides if word.split("=")[0].lstrip("+~").split(".")[0] != "task"]
    chosen = _chosen(configuration.task["only"])
    configured = {item.name: configure([*item.overrides, *shared, f"run.name={item.name}"]) for item in chosen}
    out = Path(configuration.task["out"])
    reports: dict[str, Report] = {}
    for item in chosen:  # all are configured by now: a word that one of them does not know ends no release half-way
        reports[item.name] = _build(item, configured[item.name], out)
    print(text_table(reports))
    print(f"{len(reports)} checkpoints in {out}")


def read_release(path: Path) -> Release:
    """One file of `conf/release`."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"expected a release in {path}, found: {error}; mend the file") from error
    if not isinstance(values, Mapping) or values.keys() != {"title", "overrides"}:
        raise UserError(f"expected title and overrides in {path}, found {values!r}: write them down")
    return Release(path.stem, str(values["title"]), tuple(map(str, values["overrides"])))


def _chosen(only: Any) -> list[Release]:
    paths = {path.stem: path for path in sorted(RELEASES.glob("*.yaml"))}
    names = list(paths) if only is None else [only] if isinstance(only, str) else only
    if not isinstance(names, list) or not names:
        raise UserError(f"expected task.only to be a list such as [universal], found {only!r}: change it")
    for name in names:
        check_choice("a checkpoint of task.only", name, paths)
    return [read_release(paths[name]) for name in names]


def _build(item: Release, configuration: Configuration, out: Path) -> Report:
    examples = examples_for(configuration)
    run = begin(configuration)
    print(f"{item.name}: {item.title}; run directory {run.directory}", file=sys.stderr)
    reports = fit_on(run, examples, stored_split(run, examples), item.title)
    replace_directory(run.directory / CHECKPOINT, out / item.name)
    return reports[ESTIMATOR]


def replace_directory(source: Path, target: Path) -> None:
    """Put a copy in the place of a directory, so that at no time there is half of one."""
    new, old = (target.with_name(f".{target.name}.{suffix}") for suffix in ("new", "old"))
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
