"""Write the tables and the picture of README.md and docs/collocation.md: `python -m benchmarks.collocation.tables DIR`.

DIR is the directory of the public traces. All figures are simulated; peaks and solo times were measured by others.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.page import write_part
from vramcast.collocation.cluster_simulation.comparison import EstimatorResult, compare, text_table
from vramcast.collocation.cluster_simulation.gantt_drawing import draw_gantt
from vramcast.collocation.cluster_simulation.gantt_table import gantt_table
from vramcast.collocation.cluster_simulation.needs import ESTIMATORS, ORACLE, OURS, NeedRules
from vramcast.collocation.cluster_simulation.ours import AnswerSettings, bounds_bytes
from vramcast.collocation.cluster_simulation.rules import ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission, TraceJob, read_jobs, read_trace
from vramcast.dataset_builder.simulation_store import SimulationStore

TRACES = ("t1", "t2", "heavy60", "mix90")
DRAWN = "t1", (ORACLE, OURS, "gpumemnet", "none")
DEVICE = "a100_40gb"
CARMA_MARGIN_MIB = 2048
CLOSE = 1.02
"""The goal: at most this multiple of the oracle's makespan and mean completion time."""
PUBLISHED = {
    "oracle": (0.712, 0.594, "0 of 180"),
    "gpumemnet": (0.737, 0.629, "1 of 180"),
    "horus": (0.733, 0.624, "3 of 180"),
    "faketensor": (0.794, 0.648, "0 of 180"),
    "none": (0.730, 0.613, "12 of 180"),
}
"""AEGIS, 3 traces of 60 jobs: makespan and mean JCT relative to exclusive use (geometric means), and failures."""
Outcomes = Mapping[str, EstimatorResult]


class Study:
    """The four traces, and our reservations for their jobs."""

    def __init__(self, data: Path, cache: SimulationStore, settings: AnswerSettings, repeats: int) -> None:
        self.jobs: Mapping[str, TraceJob] = read_jobs(data / "jobs.csv")
        self.traces = {name: read_trace(data / f"philly_{name}.csv", self.jobs) for name in TRACES}
        self.cache, self.settings, self.repeats = cache, settings, repeats
        self.used = {item.job.name: item.job for trace in self.traces.values() for item in trace}
        self.bounds = self.bounds_at(settings.risk)

    def bounds_at(self, risk: float) -> Mapping[str, int]:
        return bounds_bytes(self.used.values(), DEVICE, replace(self.settings, risk=risk), self.cache)

    def outcomes(
        self, trace: Sequence[Submission], rules: ClusterRules, margin_mib: int = 0, repeats: int = 1
    ) -> Outcomes:
        need_rules = NeedRules(rules.capacity_bytes, margin_mib)
        needs = {name: need_rules.needs_bytes(name, self.used.values(), self.bounds) for name in ESTIMATORS}
        return compare(trace, needs, rules, repeats, jitter_s=60)

    def all_outcomes(self, rules: ClusterRules, margin_mib: int = 0, repeats: int = 1) -> dict[str, Outcomes]:
        return {name: self.outcomes(trace, rules, margin_mib, repeats) for name, trace in self.traces.items()}

    def at_risk(self, risk: float) -> "Study":
        return self._with_bounds(self.bounds_at(risk))

    def above_peaks(self, share: float) -> "Study":
        """Return the study with bounds at this share above the true peaks."""
        return self._with_bounds({name: round((1 + share) * job.peak_bytes) for name, job in self.used.items()})

    def _with_bounds(self, bounds: Mapping[str, int]) -> "Study":
        other = copy(self)
        other.bounds = bounds
        return other


def ratios(results: Mapping[str, Outcomes], only: Sequence[str] = ESTIMATORS) -> Iterator[str]:
    """Yield a table of makespan and mean completion time relative to the oracle, and of crashes."""
    yield "| estimator | " + " | ".join(f"{name}: makespan | JCT | OOMs" for name in results) + " |"
    yield "| --- |" + " ---: |" * 3 * len(results)
    for estimator in only:
        yield f"| {estimator} | " + " | ".join(_ratio(outcomes, estimator) for outcomes in results.values()) + " |"


def _ratio(outcomes: Outcomes, estimator: str) -> str:
    own, oracle = outcomes[estimator].metrics, outcomes[ORACLE].metrics
    return f"{own.makespan_s / oracle.makespan_s:.3f} | {own.mean_jct_s / oracle.mean_jct_s:.3f} | {own.ooms:.3g}"


def oracle_deviations(results: Mapping[str, Outcomes]) -> str:
    """Return a line with the deviation of the oracle's figures over shifted arrivals."""
    cells = []
    for outcomes in results.values():
        oracle = outcomes[ORACLE]
        for figure, mean in (("makespan_s", oracle.metrics.makespan_s), ("mean_jct_s", oracle.metrics.mean_jct_s)):
            cells.append(f"{oracle.deviations[figure] / mean:.1%}")
        cells.append("")
    return "| *standard deviation of the oracle* | " + " | ".join(cells) + " |"


def verdict(results: Mapping[str, Outcomes], subject: str) -> str:
    """Say on which traces ours is within the goal, and on which it is better than all others."""
    near, ahead, crashes = [], [], 0.0
    for name, outcomes in results.items():
        figures = {key: (item.metrics.makespan_s, item.metrics.mean_jct_s) for key, item in outcomes.items()}
        own, others = figures[OURS], [figures[key] for key in figures if key not in (ORACLE, OURS)]
        crashes += outcomes[OURS].metrics.ooms
        near += [name] if all(a <= CLOSE * b for a, b in zip(own, figures[ORACLE], strict=True)) else []
        ahead += [name] if all(a < b for other in others for a, b in zip(own, other, strict=True)) else []
    often = f"{crashes:.3g} times" if crashes else "never"
    return (
        f"{subject}: ours runs out of memory {often}; makespan and mean JCT are both within 2 % of the oracle's on "
        f"{', '.join(near) or 'no trace'}, and both better than every other estimator's on "
        f"{', '.join(ahead) or 'no trace'}."
    )


def plain(study: Study, results: Mapping[str, Outcomes]) -> Iterator[str]:
    for name, trace in study.traces.items():
        alone = study.outcomes(trace, ClusterRules(policy="exclusive"))[ORACLE]
        yield f"\n**{name}**\n\n{text_table({'(exclusive use)': alone, **results[name]})}"


def published(study: Study) -> Iterator[str]:
    yield "| estimator | makespan | AEGIS measured | mean JCT | AEGIS measured | OOMs | AEGIS measured |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    shared = study.all_outcomes(ClusterRules(), CARMA_MARGIN_MIB).values()
    alone = [item[ORACLE].metrics for item in study.all_outcomes(ClusterRules(policy="exclusive")).values()]
    for estimator, (makespan, jct, failed) in PUBLISHED.items():
        own = [outcomes[estimator].metrics for outcomes in shared]
        spans = _geometric([item.makespan_s / base.makespan_s for item, base in zip(own, alone, strict=True)])
        times = _geometric([item.mean_jct_s / base.mean_jct_s for item, base in zip(own, alone, strict=True)])
        ooms = f"{sum(item.ooms for item in own):.0f} of {sum(item.jobs for item in own)}"
        yield f"| {estimator} | {spans:.3f} | {makespan:.3f} | {times:.3f} | {jct:.3f} | {ooms} | {failed} |"


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def widths(study: Study) -> str:
    """Compare our bounds with the true peaks in a sentence."""
    built = {name: job for name, job in study.used.items() if name in study.bounds}
    over = sorted(study.bounds[name] / job.peak_bytes for name, job in built.items())
    whole = sum(study.bounds[name] >= ClusterRules().capacity_bytes for name in built)
    low = [name for name, job in built.items() if study.bounds[name] < job.peak_bytes]
    return (
        f"With `{study.settings.checkpoint}` at a risk of {study.settings.risk:.0%}, {len(built)} of "
        f"{len(study.used)} jobs of the traces can be built; the reservation is {over[len(over) // 2]:.2f} times "
        f"the true peak in the median, a whole GPU for {whole} of them, and too small for {', '.join(low) or 'none'}."
    )


def variants(study: Study) -> Iterator[str]:
    """Yield a table for each other rule and each other risk."""
    repeats = study.repeats
    for title, rules, margin_mib in (
        ("CARMA's margin of 2,048 MiB on point estimates", ClusterRules(), CARMA_MARGIN_MIB),
        ("`--ledger reserved`", ClusterRules(ledger="reserved"), 0),
        ("`--queue backfill`", ClusterRules(queue="backfill"), 0),
        ("`--policy best-fit`", ClusterRules(policy="best-fit"), 0),
        ("`--remember`: a job that ran before in the trace asks for its peak and 5 %", ClusterRules(remember=True), 0),
    ):
        results = study.all_outcomes(rules, margin_mib, repeats)
        yield f"\n{title}:\n\n" + "\n".join(ratios(results))
    for risk in (0.02, 0.05, 0.1):
        results = study.at_risk(risk).all_outcomes(ClusterRules(), 0, repeats)
        yield f"\n`--risk {risk}`:\n\n" + "\n".join(ratios(results, [OURS]))
    for share in (0.05, 0.1, 0.15):
        results = study.above_peaks(share).all_outcomes(ClusterRules(), 0, repeats)
        yield f"\nAll bounds {share:.0%} above the true peak:\n\n" + "\n".join(ratios(results, [OURS]))


def sections(study: Study) -> Iterator[tuple[str, str]]:
    """Yield the generated parts of the page."""
    once = study.all_outcomes(ClusterRules())
    repeated = study.all_outcomes(ClusterRules(), 0, study.repeats)
    yield "aegis", "\n".join(published(study))
    yield (
        "verdict",
        "\n".join(
            [
                f"- {widths(study)}",
                f"- {verdict(once, 'The traces as they are')}",
                f"- {verdict(repeated, f'Means of {study.repeats} runs with shifted arrivals')}",
            ]
        ),
    )
    yield "traces", "\n".join(plain(study, once))
    yield "ratios", "\n".join(ratios(once))
    yield "means", "\n".join([*ratios(repeated), oracle_deviations(repeated)])
    yield "variants", "\n".join(variants(study))


def draw(study: Study, path: Path) -> None:
    name, estimators = DRAWN
    outcomes = study.outcomes(study.traces[name], ClusterRules())
    charts = {estimator: gantt_table(outcomes[estimator].runs) for estimator in estimators}
    draw_gantt(charts, ClusterRules().capacity_bytes, f"philly_{name} on 4 x {DEVICE}, simulated", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, metavar="DIR")
    parser.add_argument("--cache", default="runs/simulations")
    parser.add_argument("--checkpoint", default="universal")
    parser.add_argument("--risk", type=float, default=AnswerSettings().risk)
    parser.add_argument("--bucket-mib", type=int, default=AnswerSettings().bucket_mib)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--page",
        type=Path,
        action="append",
        help="write into its marked parts instead of printing; repeat",
    )
    parser.add_argument("--picture", type=Path, help="draw the Gantt chart")
    arguments = parser.parse_args()
    settings = AnswerSettings(arguments.checkpoint, arguments.risk, arguments.bucket_mib)
    study = Study(arguments.data, SimulationStore(arguments.cache, 2), settings, arguments.repeats)
    if arguments.picture:
        draw(study, arguments.picture)
    for name, text in tqdm(sections(study), total=6, unit="part"):
        if arguments.page:
            write_part(arguments.page, "collocation.tables", name, text)
        else:
            print(f"\n{name}\n\n{text}", flush=True)


if __name__ == "__main__":
    main()
