"""Why regression failed, and what the virtual estimate changes: `python -m benchmarks.study.regression --data DIR`.

Regressors by folds, split by configuration, on the measured rows of each family; and fitted to all of these rows and
asked about real networks, of which they have seen none. With and without the virtual GPU's figure to start from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.dataset_builder.store.splits import make_split
from vramcast.models.baselines.extra_trees import TREES, ExtraTrees
from vramcast.models.baselines.gap import DirectPolynomial, Gap
from vramcast.models.baselines.shape_inference import ShapeInference
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.models.features import feature_set
from vramcast.models.features.full import simulated_need_bytes
from vramcast.models.metrics import Judged, judge
from vramcast.models.simulation import SimulationCache
from vramcast.virtual_gpu.sizes import MIB

REAL = "unseen_models_a100.csv"
FIGURES = ("accuracy", "median_relative_error", "p95_relative_error", "mean_error_mib", "too_low")
RAW = ("layers", "batch", "parameters", "activations")
"""What the talk regresses on, as plain numbers."""
Rows = Sequence[Example]
Bytes = NDArray[np.float64]


def raw_numbers(rows: Rows) -> Bytes:
    """[rows, RAW]."""
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
    """What was measured; a whole card where the job did not fit."""
    return np.array([row.measured.used_bytes if row.measured.fits else row.capacity_bytes for row in rows], dtype=float)


def raw_trees(train: Rows, test: Rows) -> Bytes:
    """The talk's ExtraTrees, on its four numbers."""
    return np.asarray(fitted_trees(train).predict(raw_numbers(test)))


def fitted_trees(train: Rows) -> ExtraTreesRegressor:
    """The trees themselves, for what they hold to be important."""
    return ExtraTreesRegressor(TREES, random_state=0).fit(raw_numbers(train), _capped_bytes(train))


def raw_network(train: Rows, test: Rows) -> Bytes:
    """A network on the four numbers as they are, which span nine orders of magnitude."""
    network = MLPRegressor(hidden_layer_sizes=(64, 64), max_iter=300, random_state=0).fit(
        raw_numbers(train), _capped_bytes(train) / MIB
    )
    return np.asarray(network.predict(raw_numbers(test)) * MIB)


def scaled_network(train: Rows, test: Rows) -> Bytes:
    """The same network on their logarithms, with the logarithm of the memory as its target."""
    network = make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=(64, 64), max_iter=300, random_state=0))
    network.fit(np.log1p(raw_numbers(train)), np.log(_capped_bytes(train) / MIB))
    return np.exp(np.minimum(network.predict(np.log1p(raw_numbers(test))), 20.0)) * MIB


class VirtualGap(DirectPolynomial):
    """TBEM's polynomial for what is measured beyond the virtual estimate, in the place of the static one."""

    name = "virtual_gap"

    def known_bytes(self, example: Example) -> int:
        """What the virtual GPU says."""
        return example.overhead_bytes + simulated_need_bytes(example)


def polynomial(kind: type[DirectPolynomial]) -> Callable[[Rows, Rows], Bytes]:
    """A polynomial whose degree is chosen on an eighth of the training rows."""

    def fitted(train: Rows, test: Rows) -> Bytes:
        split = make_split((row.group for row in train), {"train": 0.875, "validation": 0.125}, 0)
        parts = {name: [row for row in train if split.part_of(row.group) == name] for name in split.parts}
        return kind().fit(parts["train"], parts["validation"]).predict_bytes(test)

    return fitted


def gap_trees(train: Rows, test: Rows) -> Bytes:
    """ExtraTrees on all features, for the logarithm of what is measured against what is simulated."""
    whole = [row for row in train if row.measured.fits and row.simulation.fits]
    matrix = [list(feature_set("full").numbers(row).values()) for row in whole]
    gaps = [np.log((row.measured.used_bytes - row.overhead_bytes) / simulated_need_bytes(row)) for row in whole]
    trees = ExtraTreesRegressor(TREES, random_state=0).fit(matrix, gaps)
    found = trees.predict([list(feature_set("full").numbers(row).values()) for row in test])
    start = np.array([(row.overhead_bytes, simulated_need_bytes(row)) for row in test], dtype=np.float64)
    return np.asarray(start[:, 0] + start[:, 1] * np.exp(found))


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


def figures_of(found_bytes: Bytes, test: Rows, bucket_mib: int) -> dict[str, float | None]:
    """Point estimates against what was measured; errors over the rows that fit."""
    rows = [
        Judged(row.id, row.measured.used_bytes / MIB, not row.measured.fits, _mib_if_fits(used, row))
        for used, row in zip(found_bytes, test, strict=True)
    ]
    judged = judge(rows, bucket_mib).to_json()
    capped = [min(max(used, 0.0), row.capacity_bytes) for used, row in zip(found_bytes, test, strict=True)]
    off = [abs(a - row.measured.used_bytes) / MIB for a, row in zip(capped, test, strict=True) if row.measured.fits]
    return {**{name: judged[name] for name in FIGURES if name in judged}, "mean_error_mib": fmean(off)}


def _mib_if_fits(used_bytes: float, row: Example) -> float | None:
    return float(max(used_bytes, 0.0)) / MIB if used_bytes < row.capacity_bytes else None


def study(data: str, families: Sequence[str], folds: int, kept: ResultCache) -> Iterator[dict[str, object]]:
    """A line for each regressor, family and fold; and for the real networks."""
    known: list[Example] = []
    for family in families:
        rows = measured_examples(data, family)
        known += rows
        parts = list(folds_of(rows, folds))
        rounds = [(name, fold) for name in REGRESSORS for fold in range(folds)]
        for name, fold in tqdm(rounds, desc=family, unit="fold", mininterval=10):
            line = {"family": family, "regressor": name, "fold": fold}
            train, test = parts[fold]
            yield {**line, **kept.get(
                {"study": "regression", **line, "rows": len(rows), "folds": folds},
                lambda n=name, a=train, b=test, w=WIDTHS_MIB[family]: figures_of(REGRESSORS[n](a, b), b, w),
            )}  # fmt: skip
    real = real_examples(Path(data))
    for name in tqdm(REGRESSORS, desc="real networks", mininterval=10):
        line = {"family": "real networks", "regressor": name, "fold": 0}
        found = kept.get(
            {"study": "regression", **line, "rows": len(known)},
            lambda n=name: figures_of(REGRESSORS[n](known, real), real, WIDTHS_MIB["cnn"]),
        )
        yield {**line, **found}


def real_examples(data: Path) -> list[Example]:
    """The real networks of the talk, on the stack that the families were measured on."""
    rows = [row for row in read_rows(next(data.rglob(REAL))) if row.provenance.device == PROFILE]
    return examples_of_rows(rows, {PROFILE: load_profile(PROFILE)}, SimulationCache("runs/simulations", WORKERS))


def importances(data: str) -> dict[str, float]:
    """What the talk's trees hold to be important, on the MLP rows."""
    found = fitted_trees(measured_examples(data, "mlp")).feature_importances_
    return dict(zip(RAW, map(float, found), strict=True))


def regression_table(lines: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Means over folds, by family and regressor."""
    return pd.DataFrame(lines).groupby(["family", "regressor"], sort=False)[list(FIGURES)].mean().reset_index()


def to_markdown(table: pd.DataFrame) -> str:
    """A line a regressor; of each family the mean error in MiB, the median relative error, and the accuracy."""
    families = list(dict.fromkeys(table["family"]))
    lines = []
    for name, part in table.groupby("regressor", sort=False):
        found = part.set_index("family")
        cells = [
            f"{found.mean_error_mib[family]:,.0f} MiB, {found.median_relative_error[family]:.1%}, "
            f"{found.accuracy[family]:.3f}"
            for family in families
        ]
        lines.append([str(name), *cells])
    return markdown(["regressor", *families], lines)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Mean error in MiB of each regressor, a panel a family, on one logarithmic scale."""
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
    parser.add_argument("--out", type=Path, default=Path("runs/study/regression.jsonl"), help="what was computed")
    arguments = parser.parse_args()
    kept = ResultCache(arguments.out)
    table = regression_table(list(study(arguments.data, arguments.families, arguments.folds, kept)))
    weights = ", ".join(f"{name} {share:.3f}" for name, share in importances(arguments.data).items())
    text = f"{to_markdown(table)}\n\nImportance of the four numbers to ExtraTrees on all MLP rows: {weights}."
    publish(arguments, "study.regression", text, partial(draw, table))


if __name__ == "__main__":
    main()
