"""`task=kfold`: every fold is the test once; what is told is the mean and the spread."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from vramcast.dataset_builder.store.splits import Split, make_folds, make_split
from vramcast.models.comparison import COLUMNS
from vramcast.models.example import Example
from vramcast.train.run import METRICS, Run
from vramcast.train.tasks.fit import SPLIT, fit_on


def kfold(run: Run, examples: Sequence[Example]) -> None:
    """Carry out all folds, or those that are missing."""
    folds = _stored_folds(run, examples)
    for name in folds.parts:
        part = Run(run.configuration, run.directory / name)
        part.directory.mkdir(exist_ok=True)
        if not part.finished:
            fit_on(part, examples, split_for(folds, name, run.configuration.split))
    found = spread([Run(run.configuration, run.directory / name).read_json(METRICS) for name in folds.parts])
    run.write_json(METRICS, found)
    print(table_of(found))
    print(f"{len(folds.parts)} folds, mean and spread; everything is in {run.directory}")


def _stored_folds(run: Run, examples: Sequence[Example]) -> Split:
    path = run.directory / SPLIT
    if not path.exists():
        configuration = run.configuration
        groups = (example.group for example in examples)
        make_folds(groups, configuration.task["folds"], configuration.seed).save(path)
    return Split.load(path)


def split_for(folds: Split, test: str, fractions: Mapping[str, float]) -> Split:
    """One fold as the test; the others are parted as the configuration says, without its test."""
    rest = [group for name, groups in folds.parts.items() if name != test for group in groups]
    others = {name: share / (1 - fractions["test"]) for name, share in fractions.items() if name != "test"}
    inner = make_split(rest, others, folds.seed)
    return replace(inner, parts={**inner.parts, "test": folds.parts[test]})


def spread(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each figure over the folds, by estimator."""
    names = metrics[0]["estimators"]
    return {"folds": len(metrics), "estimators": {name: _spread_of(name, metrics) for name in names}}


def _spread_of(name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for figure in COLUMNS.values():
        values = [fold["estimators"][name][figure] for fold in metrics]
        known = [value for value in values if value is not None]
        deviation = stdev(known) if len(known) > 1 else None
        found[figure] = {"mean": fmean(known), "deviation": deviation, "folds": values} if known else None
    return found


def table_of(found: Mapping[str, Any]) -> str:
    """The figures for people, a line an estimator."""
    lines = [f"{'estimator':22} " + " ".join(f"{title:>17}" for title in COLUMNS)]
    for name, figures in found["estimators"].items():
        cells = [_cell(key, figures[key]) for key in COLUMNS.values()]
        lines.append(f"{name:22} " + " ".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def _cell(figure: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    digits = 0 if figure.endswith("_mib") else 4
    deviation = found["deviation"]
    return f"{found['mean']:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")
