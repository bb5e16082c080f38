"""Compare memory bounds on random traces of measured networks.

Run `python -m benchmarks.collocation.measured_traces --data DIR`. The four published traces are few, and chance decides
how each of them packs. This benchmark draws jobs from the public timm table, which has their measured peaks and
FakeTensor's figures. Our bounds are calibrated on other designs, in five folds: a job's own design never enters its
bound. Arrivals and solo times are random. All runs are simulated.
"""

import math
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.page import write_part
from vramcast.collocation.cluster_simulation.cluster import simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import ClusterMetrics, cluster_metrics
from vramcast.collocation.cluster_simulation.needs import FLOOR_MIB
from vramcast.collocation.cluster_simulation.rules import ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission, TraceJob
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.defaults import RISK
from vramcast.device.profiles import load_profile
from vramcast.errors import check_count
from vramcast.models.baselines.fake_tensor import read_published
from vramcast.models.estimators.calibrated_simulation import CalibratedSimulation
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status

TABLE = "timm_sgd_a100.csv"
PROFILE = "a100_40gb_timm_2024"
RISKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
GAPS_S = (150, 300)
"""Mean times between arrivals; the first is that of the densest public trace."""
JOBS = 60
MEDIAN_SOLO_S, SOLO_SIGMA = 1500.0, 0.8
"""Parameters of a log-normal distribution, close to that of the public jobs."""
FOLDS = 5
LARGE_GIB = 24
"""Jobs from here leave less than half of a device."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Networks that completed and whose peak is not from a cuDNN trial, as without cudnn.benchmark."""

    peaks_bytes: Array
    """Memory of the job itself; the table's figures include other processes."""
    needs_bytes: Mapping[str, Array]
    """Reserved memory by estimator."""


def measured(data: Path, cache: SimulationStore) -> Measured:
    path, profile = next(data.rglob(TABLE)), load_profile(PROFILE)
    rows = (row for row in read_rows(path) if row.measurement.status is Status.OK)
    examples = examples_of_rows(rows, {PROFILE: profile}, cache)
    examples = [_without_trials(item) for item in examples if not item.measured.trial]
    fake_tensor = read_published(path)
    others_bytes = profile.other_mib * MIB
    overheads = np.array([example.overhead_bytes for example in examples], dtype=np.float64)
    own = np.array([example.measured.used_bytes for example in examples]) - overheads
    needs = {f"ours, risk {risk:.1%}": bound - others_bytes for risk, bound in bounds_of(examples)}
    needs["FakeTensor"] = np.array([fake_tensor[example.id] for example in examples], dtype=np.float64)
    needs[f"none, {FLOOR_MIB} MiB free"] = np.full(len(examples), FLOOR_MIB * MIB, dtype=np.float64)
    peaks = own + overheads - others_bytes
    return Measured(peaks, {**needs, **_what_if(peaks, needs[f"ours, risk {RISK:.1%}"])})


def _what_if(peaks: Array, bounds: Array) -> dict[str, Array]:
    """Return needs that tell which bounds cost time: those of large jobs, or those of all others; and all equally."""
    large = peaks >= LARGE_GIB * 2**30
    return {
        f"*ours, but true peaks from {LARGE_GIB} GiB*": np.where(large, peaks, bounds),
        f"*ours, but true peaks below {LARGE_GIB} GiB*": np.where(large, bounds, peaks),
        "*true peaks and 5 %*": 1.05 * peaks,
    }


def bounds_of(examples: Sequence[Example]) -> Iterator[tuple[float, Array]]:
    """Yield the bounds at each risk on a device, by the kind of the released checkpoint, fitted to other designs."""
    designs = sorted({example.design for example in examples})
    Random(0).shuffle(designs)
    fold_of = {design: index % FOLDS for index, design in enumerate(designs)}
    folds = np.array([fold_of[example.design] for example in examples])
    bounds = {risk: np.zeros(len(examples)) for risk in RISKS}
    for fold in range(FOLDS):
        test = [example for example, own in zip(examples, folds, strict=True) if own == fold]
        fitted = CalibratedSimulation().fit(
            [item for item, own in zip(examples, folds, strict=True) if own != fold], []
        )
        for risk, bound in bounds.items():
            bound[folds == fold] = fitted.distribution(test, risk).quantile_bytes(1 - risk)
    yield from bounds.items()


def _without_trials(example: Example) -> Example:
    """Return the job as without cudnn.benchmark, of whose trials its peak shows none."""
    return replace(example, simulated=replace(example.simulation, trial_bytes=None, tried_bytes=None))


def traces(
    measured: Measured, gap_s: float, count: int, rules: ClusterRules
) -> Iterator[tuple[list[Submission], list[int]]]:
    """Yield random traces with the indices of their networks."""
    fitting = np.flatnonzero(measured.peaks_bytes < rules.capacity_bytes).tolist()
    for seed in range(count):
        random = Random(seed)
        drawn = random.choices(fitting, k=JOBS)
        arrival_s, submissions = 0.0, []
        for number, index in enumerate(drawn):
            solo_s = random.lognormvariate(math.log(MEDIAN_SOLO_S), SOLO_SIGMA)
            job = TraceJob(str(number), 1, 1, int(measured.peaks_bytes[index]), solo_s)
            submissions.append(Submission(number, arrival_s, job))
            arrival_s += random.expovariate(1 / gap_s)
        yield submissions, drawn


def table(measured: Measured, gap_s: float, count: int) -> Iterator[str]:
    """Yield the lines of a table: means over the traces, relative to the oracle on the same trace."""
    rules = ClusterRules()
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in measured.needs_bytes}
    for submissions, drawn in tqdm(traces(measured, gap_s, count, rules), total=count, unit="trace", mininterval=5):
        oracle = _run(submissions, measured.peaks_bytes[drawn], rules)
        for name, needs in measured.needs_bytes.items():
            own = _run(submissions, needs[drawn], rules)
            results[name].append((own.makespan_s / oracle.makespan_s, own.mean_jct_s / oracle.mean_jct_s, own.ooms))
    yield "| estimator | too low | needs / peak, median | makespan | mean JCT | crashes in 1,000 jobs |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, figures in results.items():
        makespan, jct, ooms = np.array(figures).T
        share = measured.needs_bytes[name] / measured.peaks_bytes
        deviations = f"{_error(makespan)} | {jct.mean():.3f} {_error(jct)}"
        yield (
            f"| {name} | {(share < 1).mean():.1%} | {np.median(share):.2f} | {makespan.mean():.3f} {deviations} | "
            f"{_short(1000 * ooms.sum() / (JOBS * count))} |"
        )


def _run(submissions: Sequence[Submission], needs_bytes: Array, rules: ClusterRules) -> ClusterMetrics:
    needs = {item.job.name: int(need) for item, need in zip(submissions, needs_bytes, strict=True)}
    return cluster_metrics(simulate(submissions, needs, rules), rules)


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _error(values: Array) -> str:
    return f"± {values.std(ddof=1) / math.sqrt(len(values)):.3f}"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the directory with the public tables")
    parser.add_argument("--cache", help="directory of simulations; default: the user's cache")
    parser.add_argument("--traces", type=int, default=150, help="number of traces, at least 2")
    parser.add_argument("--page", type=Path, help="also write into the marked part of this page")
    arguments = parser.parse_args()
    check_count("--traces", arguments.traces, least=2)
    networks = measured(arguments.data, SimulationStore(arguments.cache, 2))
    drawn = f"{len(networks.peaks_bytes):,} jobs to draw from, {arguments.traces} traces of {JOBS} jobs."
    parts = [
        f"Arrivals {gap_s} s apart in the mean:\n\n" + "\n".join(table(networks, gap_s, arguments.traces))
        for gap_s in GAPS_S
    ]
    text = "\n\n".join([drawn, *parts])
    print(text)
    if arguments.page:
        write_part(arguments.page, "collocation.measured_traces", "table", text)


if __name__ == "__main__":
    main()
