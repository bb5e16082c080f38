"""The tables of docs/collocation.md: `python -m benchmarks.collocation_tables DIR`, the directory of the public traces.

All figures are simulated; peaks and solo times of the jobs were measured by others.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from collocation.simulator.comparison import Outcome, compare, text_table
from collocation.simulator.needs import ESTIMATORS, Asking
from collocation.simulator.ours import Asked, bounds_bytes
from collocation.simulator.rules import Rules
from collocation.simulator.workload import Job, Submission, read_jobs, read_trace
from models.simulation import SimulationCache

TRACES = ("t1", "t2", "heavy60", "mix90")
CARD = "a100_40gb"
CARMA_MARGIN_MIB = 2048
PUBLISHED = {
    "oracle": (0.712, 0.594, "0 of 180"),
    "gpumemnet": (0.737, 0.629, "1 of 180"),
    "horus": (0.733, 0.624, "3 of 180"),
    "faketensor": (0.794, 0.648, "0 of 180"),
    "none": (0.730, 0.613, "12 of 180"),
}
"""AEGIS, 3 traces of 60 jobs: makespan and mean JCT against exclusive use, geometric means, and failures."""
Bounds = Mapping[str, int]


class Study:
    """The four traces, and what we set aside for their jobs."""

    def __init__(self, data: Path, cache: SimulationCache, asked: Asked) -> None:
        self.jobs: Mapping[str, Job] = read_jobs(data / "jobs.csv")
        self.traces = {name: read_trace(data / f"philly_{name}.csv", self.jobs) for name in TRACES}
        self.cache, self.asked = cache, asked
        self.bounds = self.bounds_at(asked.risk)

    def bounds_at(self, risk: float) -> Bounds:
        used = {item.job.name: item.job for trace in self.traces.values() for item in trace}
        return bounds_bytes(used.values(), CARD, replace(self.asked, risk=risk), self.cache)

    def outcomes(
        self,
        trace: Sequence[Submission],
        rules: Rules,
        margin_mib: int = 0,
        repeats: int = 1,
        bounds: Bounds | None = None,
    ) -> dict[str, Outcome]:
        asking = Asking(rules.capacity_bytes, margin_mib)
        needs = {
            name: asking.needs_bytes(name, self.jobs.values(), self.bounds if bounds is None else bounds)
            for name in ESTIMATORS
        }
        return compare(trace, needs, rules, repeats, jitter_s=60)


def plain(study: Study) -> None:
    print("\n## The traces as they are\n")
    for name, trace in study.traces.items():
        alone = study.outcomes(trace, Rules(policy="exclusive"))["oracle"]
        print(f"**{name}**\n\n{text_table({'(exclusive use)': alone, **study.outcomes(trace, Rules())})}\n")


def ratios(
    study: Study, title: str, rules: Rules, margin_mib: int = 0, repeats: int = 1, bounds: Bounds | None = None
) -> None:
    """Makespan and mean JCT against the oracle's, and crashes; means over the trace and its shifted copies."""
    print(f"\n## {title}\n")
    print("| estimator | " + " | ".join(f"{name}: makespan | JCT | OOMs" for name in TRACES) + " |")
    print("| --- |" + " ---: |" * 3 * len(TRACES))
    found = [study.outcomes(trace, rules, margin_mib, repeats, bounds) for trace in study.traces.values()]
    for estimator in ESTIMATORS:
        cells = []
        for outcomes in found:
            own, oracle = outcomes[estimator].report, outcomes["oracle"].report
            cells.append(
                f"{own.makespan_s / oracle.makespan_s:.3f} | {own.mean_jct_s / oracle.mean_jct_s:.3f} | {own.ooms:.3g}"
            )
        print(f"| {estimator} | " + " | ".join(cells) + " |")
    spread = [outcomes["oracle"].deviations for outcomes in found]
    if all(spread):
        means = [outcomes["oracle"].report for outcomes in found]
        cells = [
            f"{item['makespan_s'] / mean.makespan_s:.1%} | {item['mean_jct_s'] / mean.mean_jct_s:.1%} | "
            for item, mean in zip(spread, means, strict=True)
        ]
        print("| *the oracle's own standard deviation* | " + " | ".join(cells) + " |")


def published(study: Study) -> None:
    print("\n## Against AEGIS: ratios to exclusive use, geometric means over the traces, margin of 2048 MiB\n")
    print("| estimator | makespan | measured by AEGIS | mean JCT | measured by AEGIS | OOMs | measured by AEGIS |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    shared, alone = [], []
    for trace in study.traces.values():
        shared.append(study.outcomes(trace, Rules(), CARMA_MARGIN_MIB))
        alone.append(study.outcomes(trace, Rules(policy="exclusive"))["oracle"].report)
    for estimator, (makespan, jct, failed) in PUBLISHED.items():
        own = [outcomes[estimator].report for outcomes in shared]
        spans = _geometric([item.makespan_s / base.makespan_s for item, base in zip(own, alone, strict=True)])
        times = _geometric([item.mean_jct_s / base.mean_jct_s for item, base in zip(own, alone, strict=True)])
        ooms = f"{sum(item.ooms for item in own):.0f} of {sum(item.jobs for item in own)}"
        print(f"| {estimator} | {spans:.3f} | {makespan} | {times:.3f} | {jct} | {ooms} | {failed} |")


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def widths(study: Study) -> None:
    """How our bounds compare with the true peaks."""
    print("\n## What is set aside\n")
    used = {item.job.name: item.job for trace in study.traces.values() for item in trace}
    over = [study.bounds[name] / job.peak_bytes for name, job in used.items() if name in study.bounds]
    low = [name for name, job in used.items() if study.bounds.get(name, job.peak_bytes) < job.peak_bytes]
    middle, largest = sorted(over)[len(over) // 2], max(over)
    print(f"{len(over)} of {len(used)} jobs were built; bound over peak: median {middle:.2f}, largest {largest:.2f}")
    print(f"bounds that are too low: {', '.join(low) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", default="runs/simulations")
    parser.add_argument("--checkpoint", default="universal")
    parser.add_argument("--risk", type=float, default=0.01)
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    asked = Asked(arguments.checkpoint, arguments.risk, arguments.bucket_mib)
    study = Study(arguments.data, SimulationCache(arguments.cache, 2), asked)
    widths(study)
    plain(study)
    ratios(study, "Against the oracle", Rules())
    again = f"means of {arguments.repeats} runs, arrivals shifted by up to 60 s"
    ratios(study, f"Against the oracle, {again}", Rules(), repeats=arguments.repeats)
    for title, rules, margin_mib in (
        ("with CARMA's margin of 2048 MiB on point estimates", Rules(), CARMA_MARGIN_MIB),
        ("with reservations counted instead of what is observed", Rules(ledger="reserved"), 0),
        ("with backfilling", Rules(queue="backfill"), 0),
        ("with best-fit", Rules(policy="best-fit"), 0),
    ):
        ratios(study, f"The same {title}", rules, margin_mib, arguments.repeats)
    for risk in (0.05, 0.1):
        ratios(
            study, f"The same at a risk of {risk:.0%}", Rules(), repeats=arguments.repeats, bounds=study.bounds_at(risk)
        )
    published(study)


if __name__ == "__main__":
    main()
