"""`task=release`: rebuild the checkpoints listed in `conf/release`, one run each."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vramcast.device.profiles import CONF
from vramcast.errors import UserError, check_choice
from vramcast.models.comparison import EstimatorReport, text_table
from vramcast.train.configuration import Configuration, configure
from vramcast.train.experiment import ESTIMATOR, examples_for
from vramcast.train.run import start_run
from vramcast.train.tasks.fit import CHECKPOINT, fit_on, stored_split

RELEASES = CONF / "release"


@dataclass(frozen=True)
class Release:
    """The definition of a checkpoint to build."""

    name: str
    title: str
    overrides: tuple[str, ...]


def release(configuration: Configuration, overrides: Sequence[str]) -> None:
    """Build the chosen checkpoints; other overrides of the command line apply to each."""
    shared = [word for word in overrides if word.split("=")[0].lstrip("+~").split(".")[0] != "task"]
    chosen = _chosen(configuration.task["only"])
    configured = {item.name: configure([*item.overrides, *shared, f"run.name={item.name}"]) for item in chosen}
    out = Path(configuration.task["out"])
    reports: dict[str, EstimatorReport] = {}
    for item in chosen:  # all were validated above, so a bad override cannot end a release half-way
        reports[item.name] = _build(item, configured[item.name], out)
    print(text_table(reports))
    print(f"{len(reports)} checkpoints in {out}")


def read_release(path: Path) -> Release:
    """Read one file of `conf/release`."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"expected a release in {path}, found: {error}; fix the file") from error
    if not isinstance(values, Mapping) or values.keys() != {"title", "overrides"}:
        raise UserError(f"expected title and overrides in {path}, found {values!r}: add what is missing")
    return Release(path.stem, str(values["title"]), tuple(map(str, values["overrides"])))


def _chosen(only: Any) -> list[Release]:
    paths = {path.stem: path for path in sorted(RELEASES.glob("*.yaml"))}
    names = list(paths) if only is None else [only] if isinstance(only, str) else only
    if not isinstance(names, list) or not names:
        raise UserError(f"expected task.only to be a list such as [universal], found {only!r}: change it")
    for name in names:
        check_choice("a checkpoint of task.only", name, paths)
    return [read_release(paths[name]) for name in names]


def _build(item: Release, configuration: Configuration, out: Path) -> EstimatorReport:
    examples = examples_for(configuration)
    run = start_run(configuration)
    print(f"{item.name}: {item.title}; run directory {run.directory}", file=sys.stderr)
    reports = fit_on(run, examples, stored_split(run, examples), item.title)
    replace_directory(run.directory / CHECKPOINT, out / item.name)
    return reports[ESTIMATOR]


def replace_directory(source: Path, target: Path) -> None:
    """Replace a directory by a copy of another; the target is never half-written."""
    new, old = (target.with_name(f".{target.name}.{suffix}") for suffix in ("new", "old"))
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
