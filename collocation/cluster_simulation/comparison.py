"""Compares estimators on a trace under the same rules, once or over copies with shifted arrivals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from vramcast.collocation.cluster_simulation.cluster import AttemptRecord, simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import ClusterMetrics, cluster_metrics
from vramcast.collocation.cluster_simulation.needs import NONE, ORACLE
from vramcast.collocation.cluster_simulation.rules import OBSERVED, ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission
from vramcast.progress import bar

_OWN_RULES: Mapping[str, Mapping[str, Any]] = {NONE: {"ledger": OBSERVED}, ORACLE: {"remember": False}}
_MANY_JOBS = 20_000
"""Fewer take too little time for a progress bar."""


@dataclass(frozen=True)
class EstimatorResult:
    """The metrics under an estimator: means over the repeats, standard deviations, and the attempts of the first."""

    metrics: ClusterMetrics
    deviations: Mapping[str, float]
    """By metric; empty if a trace was run once."""
    runs: Sequence[AttemptRecord]

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name."""
        return {**self.metrics.to_json(), **({"sd": dict(self.deviations)} if self.deviations else {})}


def compare(
    trace: Sequence[Submission],
    needs_bytes: Mapping[str, Mapping[str, int]],
    rules: ClusterRules,
    repeats: int = 1,
    jitter_s: float = 0.0,
) -> dict[str, EstimatorResult]:
    """Run a trace under each estimator. Repeat k has the same shifted arrivals for all; the first is not shifted.

    Without an estimator nothing is reserved, so free memory is observed. The oracle needs no history.
    """
    traces = [trace, *(jittered(trace, jitter_s, seed) for seed in range(1, repeats))]
    results = {}
    total = len(needs_bytes) * len(traces)
    with bar(total=total, unit="run", disable=total * len(trace) < _MANY_JOBS, leave=False) as progress:
        for name, needs in needs_bytes.items():
            own = replace(rules, **_OWN_RULES.get(name, {}))
            runs = []
            for item in traces:
                runs.append(simulate(item, needs, own))
                progress.update()
            results[name] = _result(runs, own)
    return results


def jittered(trace: Sequence[Submission], jitter_s: float, seed: int) -> list[Submission]:
    """Delay each arrival by up to `jitter_s`: packing is chaotic, so one trace is one sample."""
    random = Random(seed)  # noqa: S311 - nothing secret
    moved = sorted(
        (replace(item, arrival_s=item.arrival_s + random.uniform(0, jitter_s)) for item in trace),
        key=lambda item: item.arrival_s,
    )
    return [replace(item, number=number) for number, item in enumerate(moved)]


def _result(runs: Sequence[Sequence[AttemptRecord]], rules: ClusterRules) -> EstimatorResult:
    reports = [cluster_metrics(item, rules).to_json() for item in runs]
    if len(reports) == 1:
        return EstimatorResult(cluster_metrics(runs[0], rules), {}, runs[0])
    values = {name: np.array([item[name] for item in reports]) for name in reports[0]}
    jobs = int(values.pop("jobs")[0])  # the same in all
    deviations = {name: float(value.std(ddof=1)) for name, value in values.items()}
    means = {name: float(value.mean()) for name, value in values.items()}
    return EstimatorResult(ClusterMetrics(jobs=jobs, **means), deviations, runs[0])


_COLUMNS = {
    "makespan_s": ("makespan", "{:.0f}"),
    "mean_jct_s": ("mean JCT", "{:.0f}"),
    "p95_jct_s": ("p95 JCT", "{:.0f}"),
    "mean_wait_s": ("mean wait", "{:.0f}"),
    "ooms": ("OOMs", "{:.3g}"),
    "wasted_gpu_s": ("wasted GPU s", "{:.0f}"),
    "memory_utilisation": ("memory used", "{:.1%}"),
    "gpu_utilisation": ("GPUs busy", "{:.1%}"),
}


def text_table(results: Mapping[str, EstimatorResult]) -> str:
    """Return a Markdown table with a line for each estimator; times in seconds."""
    lines = [["estimator", *(title for title, _ in _COLUMNS.values())], ["---", *["---:"] * len(_COLUMNS)]]
    for name, result in results.items():
        figures = result.metrics.to_json()
        lines.append([name, *(form.format(figures[column]) for column, (_, form) in _COLUMNS.items())])
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join([first, *others]) + " |"
