"""Learning curves of samplers at equal cost: `python -m benchmarks.study.sampling_curves --data DIR`.

Two estimators without the virtual estimate are trained on the first rows of each sampler: TBEM's gap polynomial, and an
MLP over a layer table. Training rows are simulated, so that thousands are affordable; cost is counted in rows. The test
rows are the same for all: uniform draws with another seed (simulated), and the measured rows of the family.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks.page import study_parser, write_part
from benchmarks.small_pictures import light_picture
from benchmarks.study.result_cache import ResultCache
from benchmarks.study.rows import WIDTHS_MIB, drawn_specs, measured_examples, simulated_examples
from benchmarks.study.style import BLUE, GREEN, ORANGE, RED, VIOLET, markdown, scatter
from vramcast.dataset_builder.store.splits import make_split
from vramcast.jobs.spec import Spec
from vramcast.models.baselines.gap import Gap
from vramcast.models.buckets import Buckets
from vramcast.models.comparison import compare
from vramcast.models.drawing import quiet
from vramcast.models.estimators._base import Estimator
from vramcast.models.estimators.classifiers import NetworkSettings
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB

SAMPLERS: Mapping[str, Sequence[str]] = {
    "uniform": ["sampler=uniform"],
    "orthogonal, 5 levels": ["sampler=orthogonal", "sampler.max_levels=5"],
    "orthogonal": ["sampler=orthogonal"],
    "orthogonal, strength 3": ["sampler=orthogonal", "sampler.strength=3"],
    "combined": ["sampler=combined"],
    "tbem": ["sampler=tbem"],
}
COLOURS = dict(zip(SAMPLERS, (BLUE, RED, ORANGE, "#b07aa1", GREEN, VIOLET), strict=True))
TEST_SEED = 1000
"""Seed of the test rows, far from all training seeds."""
LEAST_SHARE = 0.85
"""A sampler gets a point at a size if it has this share of the rows: arrays are finite, and some runs cannot run."""
VALIDATION = 0.2


@dataclass(frozen=True)
class Setting:
    """A space in which samplers are compared."""

    space: str
    family: str
    samplers: tuple[str, ...]
    sizes: tuple[int, ...]
    bucket_mib: int
    measured: bool
    """The space has measured rows."""
    tested: int = 300
    """Number of simulated test rows."""


_ARRAYS = ("uniform", "orthogonal, 5 levels", "orthogonal", "orthogonal, strength 3", "combined")
SETTINGS = {
    "mlp": Setting("gpumemnet_mlp_step2", "mlp", _ARRAYS, (50, 100, 200, 400), WIDTHS_MIB["mlp"], True),
    "cnn": Setting("gpumemnet_cnn_step1", "cnn", _ARRAYS, (50, 100, 200, 400), WIDTHS_MIB["cnn"], True),
    "template": Setting("template", "template", ("uniform", "orthogonal", "tbem"), (50, 100), 8000, False, 100),
}


def gap_polynomial(rows: Sequence[Example]) -> Estimator:
    """Fit TBEM's gap polynomial; its degree is selected on a fifth of the rows, which count towards the cost."""
    split = make_split((example.group for example in rows), {"train": 1 - VALIDATION, "validation": VALIDATION}, 0)
    parts = {name: [row for row in rows if split.part_of(row.group) == name] for name in split.parts}
    return Gap().fit(parts["train"], parts["validation"])


def layer_network(rows: Sequence[Example]) -> Estimator:
    """Fit an MLP to a layer table and the static estimate."""
    return Ensemble.of(NetworkSettings(features="layers"), 1, PlainFitter(patience=20)).fit(rows, [])


ESTIMATORS: Mapping[str, Callable[[Sequence[Example]], Estimator]] = {
    "gap polynomial": gap_polynomial,
    "MLP, layers": layer_network,
}


def stream(setting: Setting, sampler: str, seed: int, count: int) -> list[Spec]:
    """Return the first configurations of a sampler."""
    words = [f"family={setting.family}", f"space={setting.space}", *SAMPLERS[sampler], f"seed={seed}"]
    return drawn_specs(words, count)


def curve_lines(
    setting: Setting, rows: Sequence[Example], tests: Mapping[str, Sequence[Example]]
) -> Iterator[dict[str, object]]:
    """Fit each estimator to these rows and yield its figures on each test."""
    trained = {row.group for row in rows}
    for name, fit in ESTIMATORS.items():
        estimator = fit(rows)
        for kind, test in tests.items():
            unseen = [example for example in test if example.group not in trained]
            buckets = Buckets(setting.bucket_mib * MIB, test[0].capacity_bytes)
            figures = compare({name: estimator}, unseen, buckets)[name].overall
            yield {
                "estimator": name, "test": kind, "rows": len(rows),
                "completed": sum(row.measured.fits for row in rows), "accuracy": figures.accuracy,
                "mean_error": figures.mean_relative_error, "median_error": figures.median_relative_error,
            }  # fmt: skip


def study(name: str, arguments: argparse.Namespace, cache: ResultCache) -> Iterator[dict[str, object]]:
    """Yield a line for each sampler, seed, size, estimator and test."""
    setting = SETTINGS[name]
    sizes = [size for size in setting.sizes if size <= arguments.most]
    keys = [(seed, sampler) for seed in range(1, arguments.seeds + 1) for sampler in setting.samplers]
    streams = {(seed, sampler): stream(setting, sampler, seed, max(sizes)) for seed, sampler in keys}
    test_specs = stream(setting, "uniform", TEST_SEED, setting.tested)
    examples = simulated_examples([*test_specs, *chain(*streams.values())], f"curves-{name}")
    tests = {"simulated": _simulated(test_specs, examples)}
    if setting.measured:
        tests["measured"] = measured_examples(arguments.data, setting.family, arguments.measured)
    counts = {kind: len(test) for kind, test in tests.items()}
    for (seed, sampler), specs in tqdm(streams.items(), desc=name, unit="stream", mininterval=10):
        for size in (size for size in sizes if len(specs) >= LEAST_SHARE * size):
            line = {"field": name, "sampler": sampler, "seed": seed, "size": size}
            points = cache.get(
                {"study": "curves", **line, **counts},
                lambda used=specs[:size]: list(curve_lines(setting, _simulated(used, examples), tests)),
            )
            yield from ({**line, **point} for point in points)


def _simulated(specs: Sequence[Spec], examples: Mapping[str, Example]) -> list[Example]:
    return [examples[spec.id] for spec in specs if spec.id in examples]


def curves_table(lines: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Return means and deviations over seeds."""
    keys = ["field", "test", "estimator", "sampler", "size"]
    groups = pd.DataFrame(lines).groupby(keys, sort=False)
    figures = {
        name: (column, kind)
        for column in ("accuracy", "mean_error", "median_error")
        for name, kind in ((column, "mean"), (f"{column}_scatter", scatter))
    }
    return groups.agg(
        rows=("rows", "mean"), completed=("completed", "mean"), seeds=("seed", "nunique"), **figures
    ).reset_index()


def to_markdown(table: pd.DataFrame, test: str, figure: str) -> str:
    """Return a table with one line per space, estimator and sampler, and one column per size."""
    chosen = table[table["test"] == test]
    sizes = sorted(set(chosen["size"]))
    lines = []
    order = ["field", "estimator", "sampler"]
    for (field, estimator, sampler), part in sorted(chosen.groupby(order), key=lambda item: _place(*item[0])):
        by_size = part.set_index("size")
        cells = [
            f"{by_size[figure][size]:.1%} ± {by_size[f'{figure}_scatter'][size]:.1%}" if size in by_size.index else ""
            for size in sizes
        ]
        lines.append([f"{field}, {estimator}", sampler, *cells])
    return markdown(["space, estimator", "sampler", *(f"{size} rows" for size in sizes)], lines)


def _place(field: str, estimator: str, sampler: str) -> tuple[int, ...]:
    return list(SETTINGS).index(field), list(ESTIMATORS).index(estimator), list(SAMPLERS).index(sampler)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the mean error by rows, one panel per space and test (rows) and estimator (columns)."""
    places = list(dict.fromkeys(zip(table["field"], table["test"], strict=True)))
    estimators = list(dict.fromkeys(table["estimator"]))
    with light_picture(path, 4.6 * len(estimators), 2.6 * len(places)) as figure:
        grid = figure.subplots(len(places), len(estimators), squeeze=False)
        for line, (field, test) in zip(grid, places, strict=True):
            for axes, estimator in zip(line, estimators, strict=True):
                part = table[(table["field"] == field) & (table["test"] == test) & (table["estimator"] == estimator)]
                _draw_curves(axes, part)
                axes.set_title(f"{field}: {estimator}, judged on {test} rows", fontsize=9)
        handles = {
            label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, fontsize=9, frameon=False)


def _draw_curves(axes: object, part: pd.DataFrame) -> None:
    for number, (sampler, curve) in enumerate(part.groupby("sampler", sort=False)):
        shifted = curve["rows"] * (1 + 0.015 * (number - 2))  # keeps error bars at the same size apart
        axes.errorbar(
            shifted, 100 * curve["mean_error"], yerr=100 * curve["mean_error_scatter"], marker="o", markersize=4,
            linewidth=1.4, capsize=2, color=COLOURS[str(sampler)], label=sampler,
        )  # fmt: skip
    sizes = sorted(set(part["size"]))
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="rows learned from (simulated)", ylabel="mean relative error [%]", ylim=(0, None))
    quiet(axes)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--fields", nargs="+", default=["mlp", "cnn"], choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=400, help="maximum of training rows")
    parser.add_argument("--measured", type=int, default=600, help="maximum of measured rows per family")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="cached results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name in arguments.fields:
        lines += list(study(name, arguments, ResultCache(arguments.out / f"curves-{name}.jsonl")))
    table = curves_table(lines)
    for test in dict.fromkeys(table["test"]):
        text = to_markdown(table, test, "mean_error")
        print(f"\nMean relative error on {test} rows, and its scatter over seeds\n\n{text}")
        if arguments.page:
            write_part(arguments.page, "study.sampling_curves", f"{test} rows", text)
    if arguments.picture:
        draw(table, arguments.picture)


if __name__ == "__main__":
    main()
