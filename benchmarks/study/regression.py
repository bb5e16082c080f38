"""Regression with and without the virtual estimate: `python -m benchmarks.study.regression --data DIR`.

Cross-validates regressors on the measured rows of each family, split by configuration. Then fits them to all of these
rows and tests them on real networks that are not among them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from benchmarks.page import publish, study_parser
from benchmarks.small_pictures import light_picture
from benchmarks.study.result_cache import ResultCache
from benchmarks.study.rows import FAMILIES, PROFILE, WIDTHS_MIB, WORKERS, folds_of, measured_examples
from benchmarks.study.style import BLUE, GREEN, GREY, ORANGE, family_bars, markdown
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import make_split
from vramcast.device.profiles import load_profile
from vramcast.models.baselines.extra_trees import TREES, ExtraTrees
from vramcast.models.baselines.gap import DirectPolynomial, Gap
from vramcast.models.baselines.shape_inference import ShapeInference
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.buckets import Buckets
from vramcast.models.comparison import rows_of
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.models.features import feature_set
from vramcast.models.features.full import simulated_need_bytes
from vramcast.models.metrics import score
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status

REAL = "unseen_models_a100.csv"
FIGURES = ("accuracy", "median_relative_error", "p95_relative_error", "mean_error_mib", "too_low")
RAW = ("layers", "batch", "parameters", "activations")
"""The talk's inputs to regression, as plain numbers."""
Rows = Sequence[Example]
Bytes = NDArray[np.float64]


def raw_numbers(rows: Rows) -> Bytes:
    """Return the talk's inputs, [rows, RAW]."""
    return np.array(
        [
            [
                len(row.layers), row.training.batch_size, sum(layer.parameters for layer in row.layers),
                sum(layer.activations for layer in row.layers),
            ]
            for row in rows
        ],
        dtype=np.float64,
    )  # fmt: skip


def _capped_bytes(rows: Rows) -> Bytes:
    """Return the measured memory; the device's capacity for jobs that did not fit."""
    return np.array([row.measured.used_bytes if row.measured.fits else row.capacity_bytes for row in rows], dtype=float)


def raw_trees(train: Rows, test: Rows) -> Bytes:
    """Predict with the talk's ExtraTrees on its four numbers."""
    return np.asarray(fitted_trees(train).predict(raw_numbers(test)))


def fitted_trees(train: Rows) -> ExtraTreesRegressor:
    """Fit the talk's ExtraTrees."""
    return ExtraTreesRegressor(TREES, random_state=0).fit(raw_numbers(train), _capped_bytes(train))


def raw_network(train: Rows, test: Rows) -> Bytes:
    """Predict with a network on the four numbers as they are, which span nine orders of magnitude."""
    network = MLPRegressor(hidden_layer_sizes=(64, 64), max_iter=300, random_state=0).fit(
        raw_numbers(train), _capped_bytes(train) / MIB
    )
    return np.asarray(network.predict(raw_numbers(test)) * MIB)


def scaled_network(train: Rows, test: Rows) -> Bytes:
    """Predict with the same network on logarithms of inputs and memory."""
    network = make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=(64, 64), max_iter=300, random_state=0))
    network.fit(np.log1p(raw_numbers(train)), np.log(_capped_bytes(train) / MIB))
    return np.exp(np.minimum(network.predict(np.log1p(raw_numbers(test))), 20.0)) * MIB


class VirtualGap(DirectPolynomial):
    """TBEM's polynomial of the gap between measurement and virtual estimate, instead of the static one."""

    name = "virtual_gap"

    def static_bytes(self, example: Example) -> int:
        """Return the virtual estimate."""
        return example.overhead_bytes + simulated_need_bytes(example)


def polynomial(kind: type[DirectPolynomial]) -> Callable[[Rows, Rows], Bytes]:
    """Return a polynomial regressor whose degree is selected on an eighth of the training rows."""

    def fitted(train: Rows, test: Rows) -> Bytes:
        split = make_split((row.group for row in train), {"train": 0.875, "validation": 0.125}, 0)
        parts = {name: [row for row in train if split.part_of(row.group) == name] for name in split.parts}
        return kind().fit(parts["train"], parts["validation"]).predict_bytes(test)

    return fitted


def gap_trees(train: Rows, test: Rows) -> Bytes:
    """Predict the logarithm of measured over simulated memory with ExtraTrees on all features."""
    whole = [row for row in train if row.measured.fits and row.simulation.status is Status.OK]
    matrix = [list(feature_set("full").numbers(row).values()) for row in whole]
    gaps = [np.log((row.measured.used_bytes - row.overhead_bytes) / simulated_need_bytes(row)) for row in whole]
    trees = ExtraTreesRegressor(TREES, random_state=0).fit(matrix, gaps)
    predicted = trees.predict([list(feature_set("full").numbers(row).values()) for row in test])
    start = np.array([(row.overhead_bytes, simulated_need_bytes(row)) for row in test], dtype=np.float64)
    return np.asarray(start[:, 0] + start[:, 1] * np.exp(predicted))


REGRESSORS: Mapping[str, Callable[[Rows, Rows], Bytes]] = {
    "shapes alone, nothing learned": lambda _, test: ShapeInference().predict_bytes(test),
    "ExtraTrees, the talk's four numbers": raw_trees,
    "ExtraTrees, published features": lambda train, test: ExtraTrees().fit(train, []).predict_bytes(test),
    "neural network, four raw numbers": raw_network,
    "neural network, their logarithms": scaled_network,
    "polynomial (GV)": polynomial(DirectPolynomial),
    "polynomial of the gap to the static estimate (TBEM)": polynomial(Gap),
    "polynomial of the gap to the virtual estimate": polynomial(VirtualGap),
    "ExtraTrees of the gap to the virtual estimate": gap_trees,
    "virtual estimate, nothing learned": lambda _, test: Virtual().predict_bytes(test),
}
WITH_VIRTUAL = tuple(REGRESSORS)[-3:]


def figures_of(predicted_bytes: Bytes, test: Rows, bucket_mib: int) -> dict[str, float | None]:
    """Compare point estimates with measurements; errors are over the rows that fit."""
    points = np.array([_if_fits(used, row) for used, row in zip(predicted_bytes, test, strict=True)])
    buckets = Buckets(bucket_mib * MIB, max(row.capacity_bytes for row in test))
    judged = score(rows_of(buckets.of(points), points, test, buckets)).to_json()
    capped = [min(max(used, 0.0), row.capacity_bytes) for used, row in zip(predicted_bytes, test, strict=True)]
    errors = [abs(a - row.measured.used_bytes) / MIB for a, row in zip(capped, test, strict=True) if row.measured.fits]
    return {**{name: judged[name] for name in FIGURES if name in judged}, "mean_error_mib": fmean(errors)}


def _if_fits(used_bytes: float, row: Example) -> float:
    return max(float(used_bytes), 0.0) if used_bytes < row.capacity_bytes else inf


def study(data: str, families: Sequence[str], folds: int, cache: ResultCache) -> Iterator[dict[str, object]]:
    """Yield a line for each regressor, family and fold, and for the real networks."""
    all_rows: list[Example] = []
    for family in families:
        rows = measured_examples(data, family)
        all_rows += rows
        parts = list(folds_of(rows, folds))
        rounds = [(name, fold) for name in REGRESSORS for fold in range(folds)]
        for name, fold in tqdm(rounds, desc=family, unit="fold", mininterval=10):
            line = {"family": family, "regressor": name, "fold": fold}
            train, test = parts[fold]
            yield {**line, **cache.get(
                {"study": "regression", **line, "rows": len(rows), "folds": folds},
                lambda n=name, a=train, b=test, w=WIDTHS_MIB[family]: figures_of(REGRESSORS[n](a, b), b, w),
            )}  # fmt: skip
    real = real_examples(Path(data))
    for name in tqdm(REGRESSORS, desc="real networks", mininterval=10):
        line = {"family": "real networks", "regressor": name, "fold": 0}
        figures = cache.get(
            {"study": "regression", **line, "rows": len(all_rows)},
            lambda n=name: figures_of(REGRESSORS[n](all_rows, real), real, WIDTHS_MIB["cnn"]),
        )
        yield {**line, **figures}


def real_examples(data: Path) -> list[Example]:
    """Read the talk's real networks, measured on the same stack as the families."""
    rows = [row for row in read_rows(next(data.rglob(REAL))) if row.provenance.device == PROFILE]
    return examples_of_rows(rows, {PROFILE: load_profile(PROFILE)}, SimulationStore(None, WORKERS))


def importances(data: str) -> dict[str, float]:
    """Return the feature importances of the talk's trees on the MLP rows."""
    shares = fitted_trees(measured_examples(data, "mlp")).feature_importances_
    return dict(zip(RAW, map(float, shares), strict=True))


def regression_table(lines: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Return means over folds, by family and regressor."""
    return pd.DataFrame(lines).groupby(["family", "regressor"], sort=False)[list(FIGURES)].mean().reset_index()


def to_markdown(table: pd.DataFrame) -> str:
    """Return a table with one line per regressor: mean error, median relative error and accuracy of each family."""
    families = list(dict.fromkeys(table["family"]))
    lines = []
    for name, part in table.groupby("regressor", sort=False):
        by_family = part.set_index("family")
        cells = [
            f"{by_family.mean_error_mib[family]:,.0f} MiB, {by_family.median_relative_error[family]:.1%}, "
            f"{by_family.accuracy[family]:.3f}"
            for family in families
        ]
        lines.append([str(name), *cells])
    return markdown(["regressor", *families], lines)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the mean error of each regressor, one panel per family, on one logarithmic scale."""
    with light_picture(path, 11, 3.9) as figure:
        for axes, family, part in family_bars(figure, table, sharex=True):
            colours = [
                GREEN if name == WITH_VIRTUAL[-1] else BLUE if name in WITH_VIRTUAL else ORANGE
                for name in part["regressor"]
            ]
            axes.barh(part["regressor"], part["mean_error_mib"], color=colours, height=0.7)
            axes.axvline(1229, color=GREY, linestyle="--", linewidth=1.1)
            axes.set_xscale("log")
            axes.set_xlabel("mean error [MiB]")
            axes.tick_params(axis="y", labelsize=8)
            axes.set_title(family, fontsize=10)
        figure.suptitle(
            "Regression with (blue) and without (orange) the virtual estimate, judged on measured rows; "
            "green: nothing learned; dashed: the talk's 1.2 GB",
            fontsize=10,
        )


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/study/regression.jsonl"), help="cached results")
    arguments = parser.parse_args()
    cache = ResultCache(arguments.out)
    table = regression_table(list(study(arguments.data, arguments.families, arguments.folds, cache)))
    weights = ", ".join(f"{name} {share:.3f}" for name, share in importances(arguments.data).items())
    text = f"{to_markdown(table)}\n\nImportance of the four numbers to ExtraTrees on all MLP rows: {weights}."
    publish(arguments, "study.regression", text, partial(draw, table))


if __name__ == "__main__":
    main()
