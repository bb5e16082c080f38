"""`task=kfold`: cross-validation; every fold is the test part once."""

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
    """Run all folds that are not complete yet, and print mean and deviation."""
    folds = _stored_folds(run, examples)
    for name in folds.parts:
        part = Run(run.configuration, run.directory / name)
        part.directory.mkdir(exist_ok=True)
        if not part.finished:
            fit_on(part, examples, split_for(folds, name, run.configuration.split))
    summary = summarise([Run(run.configuration, run.directory / name).read_json(METRICS) for name in folds.parts])
    run.write_json(METRICS, summary)
    print(table_of(summary))
    print(f"{len(folds.parts)} folds, mean ± standard deviation; everything is in {run.directory}")


def _stored_folds(run: Run, examples: Sequence[Example]) -> Split:
    path = run.directory / SPLIT
    if not path.exists():
        configuration = run.configuration
        groups = (example.group for example in examples)
        make_folds(groups, configuration.task["folds"], configuration.seed).save(path)
    return Split.load(path)


def split_for(folds: Split, test: str, fractions: Mapping[str, float]) -> Split:
    """Return a split with one fold as the test part; the other parts share the rest by their fractions."""
    rest = [group for name, groups in folds.parts.items() if name != test for group in groups]
    others = {name: share / (1 - fractions["test"]) for name, share in fractions.items() if name != "test"}
    inner = make_split(rest, others, folds.seed)
    return replace(inner, parts={**inner.parts, "test": folds.parts[test]})


def summarise(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation of each figure over the folds, by estimator."""
    names = metrics[0]["estimators"]
    return {"folds": len(metrics), "estimators": {name: _summary_of(name, metrics) for name in names}}


def _summary_of(name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summary = {}
    for figure in COLUMNS.values():
        values = [fold["estimators"][name][figure] for fold in metrics]
        present = [value for value in values if value is not None]
        deviation = stdev(present) if len(present) > 1 else None
        summary[figure] = {"mean": fmean(present), "deviation": deviation, "folds": values} if present else None
    return summary


def table_of(summary: Mapping[str, Any]) -> str:
    """Format the figures as text, one line per estimator."""
    lines = [f"{'estimator':22} " + " ".join(f"{title:>17}" for title in COLUMNS)]
    for name, figures in summary["estimators"].items():
        cells = [_cell(key, figures[key]) for key in COLUMNS.values()]
        lines.append(f"{name:22} " + " ".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def _cell(figure: str, summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "-"
    digits = 0 if figure.endswith("_mib") else 4
    deviation = summary["deviation"]
    return f"{summary['mean']:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")
