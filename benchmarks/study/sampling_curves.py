"""What orthogonal arrays are worth at equal cost: `python -m benchmarks.study.sampling_curves --data DIR`.

The same two estimators, neither of which sees the virtual estimate, learn from the first rows of each sampler: TBEM's
gap polynomial, and an MLP over a layer table. Rows are simulated, so that thousands can be had; a row is the unit of
cost. All are judged on the same rows: uniform draws of another seed (simulated), and the measured rows of the family.
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
from vramcast.dataset_builder.schema import Spec
from vramcast.dataset_builder.store.splits import make_split
from vramcast.models._base import Estimator
from vramcast.models.baselines.gap import Gap
from vramcast.models.classifiers import NetworkSettings
from vramcast.models.comparison import compare
from vramcast.models.drawing import quiet
from vramcast.models.ensemble import Ensemble
from vramcast.models.example import Example
from vramcast.models.fitting import PlainFitter
from vramcast.models.labels import Buckets
from vramcast.virtual_gpu.sizes import MIB

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
"""Of the uniform draws that all are judged on; no training seed comes near it."""
LEAST_SHARE = 0.85
"""Of a size that a sampler must have in rows to have a point there: arrays have an end, and some runs cannot run."""
VALIDATION = 0.2


@dataclass(frozen=True)
class Field:
    """Where samplers compete."""

    space: str
    family: str
    samplers: tuple[str, ...]
    sizes: tuple[int, ...]
    bucket_mib: int
    measured: bool
    """Whether there are measured rows of the space."""
    tested: int = 300
    """Uniform draws that all are judged on."""


_ARRAYS = ("uniform", "orthogonal, 5 levels", "orthogonal", "orthogonal, strength 3", "combined")
FIELDS = {
    "mlp": Field("gpumemnet_mlp_step2", "mlp", _ARRAYS, (50, 100, 200, 400), WIDTHS_MIB["mlp"], True),
    "cnn": Field("gpumemnet_cnn_step1", "cnn", _ARRAYS, (50, 100, 200, 400), WIDTHS_MIB["cnn"], True),
    "template": Field("template", "template", ("uniform", "orthogonal", "tbem"), (50, 100), 8000, False, 100),
}


def gap_polynomial(rows: Sequence[Example]) -> Estimator:
    """TBEM's; its degree is chosen on a fifth of the rows, which belong to the cost."""
    split = make_split((example.group for example in rows), {"train": 1 - VALIDATION, "validation": VALIDATION}, 0)
    parts = {name: [row for row in rows if split.part_of(row.group) == name] for name in split.parts}
    return Gap().fit(parts["train"], parts["validation"])


def layer_network(rows: Sequence[Example]) -> Estimator:
    """An MLP that sees a layer table and the static estimate."""
    return Ensemble.of(NetworkSettings(features="layers"), 1, PlainFitter(patience=20)).fit(rows, [])


ESTIMATORS: Mapping[str, Callable[[Sequence[Example]], Estimator]] = {
    "gap polynomial": gap_polynomial,
    "MLP, layers": layer_network,
}


def stream(field: Field, sampler: str, seed: int, count: int) -> list[Spec]:
    """The first configurations of a sampler."""
    words = [f"family={field.family}", f"space={field.space}", *SAMPLERS[sampler], f"seed={seed}"]
    return drawn_specs(words, count)


def curve_lines(
    field: Field, rows: Sequence[Example], tests: Mapping[str, Sequence[Example]]
) -> Iterator[dict[str, object]]:
    """How estimators that learned from these rows do on each test."""
    known = {row.group for row in rows}
    for name, fit in ESTIMATORS.items():
        estimator = fit(rows)
        for kind, test in tests.items():
            unseen = [example for example in test if example.group not in known]
            buckets = Buckets(field.bucket_mib * MIB, test[0].capacity_bytes)
            found = compare({name: estimator}, unseen, buckets)[name].overall
            yield {
                "estimator": name, "test": kind, "rows": len(rows),
                "completed": sum(row.measured.fits for row in rows), "accuracy": found.accuracy,
                "mean_error": found.mean_relative_error, "median_error": found.median_relative_error,
            }  # fmt: skip


def study(name: str, arguments: argparse.Namespace, kept: ResultCache) -> Iterator[dict[str, object]]:
    """A line for each sampler, seed, size, estimator and test."""
    field = FIELDS[name]
    sizes = [size for size in field.sizes if size <= arguments.most]
    keys = [(seed, sampler) for seed in range(1, arguments.seeds + 1) for sampler in field.samplers]
    streams = {(seed, sampler): stream(field, sampler, seed, max(sizes)) for seed, sampler in keys}
    judged_on = stream(field, "uniform", TEST_SEED, field.tested)
    made = simulated_examples([*judged_on, *chain(*streams.values())], f"curves-{name}")
    tests = {"simulated": _known(judged_on, made)}
    if field.measured:
        tests["measured"] = measured_examples(arguments.data, field.family, arguments.measured)
    counts = {kind: len(test) for kind, test in tests.items()}
    for (seed, sampler), specs in tqdm(streams.items(), desc=name, unit="stream", mininterval=10):
        for size in (size for size in sizes if len(specs) >= LEAST_SHARE * size):
            line = {"field": name, "sampler": sampler, "seed": seed, "size": size}
            found = kept.get(
                {"study": "curves", **line, **counts},
                lambda used=specs[:size]: list(curve_lines(field, _known(used, made), tests)),
            )
            yield from ({**line, **one} for one in found)


def _known(specs: Sequence[Spec], made: Mapping[str, Example]) -> list[Example]:
    return [made[spec.id] for spec in specs if spec.id in made]


def curves_table(lines: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Means over seeds, and how far they scatter."""
    keys = ["field", "test", "estimator", "sampler", "size"]
    found = pd.DataFrame(lines).groupby(keys, sort=False)
    figures = {
        name: (column, kind)
        for column in ("accuracy", "mean_error", "median_error")
        for name, kind in ((column, "mean"), (f"{column}_scatter", scatter))
    }
    return found.agg(
        rows=("rows", "mean"), completed=("completed", "mean"), seeds=("seed", "nunique"), **figures
    ).reset_index()


def to_markdown(table: pd.DataFrame, test: str, figure: str) -> str:
    """A line for each field, estimator and sampler, a column a size."""
    chosen = table[table["test"] == test]
    sizes = sorted(set(chosen["size"]))
    lines = []
    order = ["field", "estimator", "sampler"]
    for (field, estimator, sampler), part in sorted(chosen.groupby(order), key=lambda item: _place(*item[0])):
        found = part.set_index("size")
        cells = [
            f"{found[figure][size]:.1%} ± {found[f'{figure}_scatter'][size]:.1%}" if size in found.index else ""
            for size in sizes
        ]
        lines.append([f"{field}, {estimator}", sampler, *cells])
    return markdown(["space, estimator", "sampler", *(f"{size} rows" for size in sizes)], lines)


def _place(field: str, estimator: str, sampler: str) -> tuple[int, ...]:
    return list(FIELDS).index(field), list(ESTIMATORS).index(estimator), list(SAMPLERS).index(sampler)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Mean error over rows, a panel for each field and test (rows) and estimator (columns)."""
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
        shifted = curve["rows"] * (1 + 0.015 * (number - 2))  # so that bars of equal sizes can be told apart
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
    parser.add_argument("--fields", nargs="+", default=["mlp", "cnn"], choices=list(FIELDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=400, help="rows that are learned from at most")
    parser.add_argument("--measured", type=int, default=600, help="measured rows of a family at most, by a fixed seed")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="what was computed")
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
