"""Ablation of features and training rows: `python -m benchmarks.study.ablation --data DIR`.

For each family, an ensemble of MLPs is cross-validated on measured rows, split by configuration. The features are the
published ones, those of a layer table, or those with the virtual estimate. The training rows are measured, simulated by
the virtual GPU from other configurations of the same space, or both. The test rows are always measured. Results are
cached in `runs/study`, so an interrupted run resumes.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks.page import publish, study_parser
from benchmarks.small_pictures import light_picture
from benchmarks.study.result_cache import ResultCache
from benchmarks.study.rows import FAMILIES, WIDTHS_MIB, drawn_specs, folds_of, measured_examples, simulated_examples
from benchmarks.study.style import FEATURE_COLOURS, GREY, family_bars, markdown, scatter
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.buckets import Buckets
from vramcast.models.comparison import compare
from vramcast.models.estimators._base import Estimator
from vramcast.models.estimators.classifiers import NetworkSettings
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB

SPACES = {"mlp": "gpumemnet_mlp_step2", "cnn": "gpumemnet_cnn_step1", "transformer": "gpumemnet_transformer_step2"}
PUBLISHED = {"mlp": (0.976, 0.984), "cnn": (0.797, 0.803), "transformer": (0.848, 0.858)}
"""Accuracy of GPUMemNet's MLP and Transformer estimators over three folds; CNNs without residual and dense ones."""
VIRTUAL_ROWS = {"mlp": 400, "cnn": 400, "transformer": 120}
"""Fewer Transformers: each takes seconds to simulate, and fewer were measured."""
VIRTUAL_SEED = 7
"""Differs from the seed of the published sets, so that the virtual rows have other configurations."""


@dataclass(frozen=True)
class Variant:
    """Features and training rows of an estimator."""

    features: str
    rows: str
    """'measured', 'virtual', 'both', or 'none' for an estimator without training."""


VARIANTS = (
    Variant("gpumemnet", "measured"),
    Variant("gpumemnet", "virtual"),
    Variant("gpumemnet", "both"),
    Variant("layers", "measured"),
    Variant("layers", "virtual"),
    Variant("layers", "both"),
    Variant("full", "measured"),
    Variant("full", "both"),
    Variant("virtual GPU", "none"),
)
"""'full' is not trained on virtual rows alone: their label is among the features. See the virtual GPU alone instead."""


def rows_for(variant: Variant, train: list[Example], virtual: list[Example], test: list[Example]) -> list[Example]:
    """Return a variant's training rows, without virtual rows of tested networks."""
    tested = {example.group for example in test}
    simulated = [example for example in virtual if example.group not in tested]
    return {"measured": train, "virtual": simulated, "both": [*train, *simulated], "none": []}[variant.rows]


def evaluate_fold(
    variant: Variant, rows: list[Example], test: list[Example], width_mib: int, members: int
) -> dict[str, float]:
    """Return the figures of one fold."""
    estimator: Estimator = Virtual()
    if variant.rows != "none":
        settings = NetworkSettings(features=variant.features, bucket_mib=width_mib)
        estimator = Ensemble.of(settings, members, PlainFitter(patience=20)).fit(rows, [])
    buckets = Buckets(width_mib * MIB, test[0].capacity_bytes)
    return compare({"variant": estimator}, test, buckets)["variant"].overall.to_json()


def study(family: str, arguments: argparse.Namespace, cache: ResultCache) -> Iterator[dict[str, object]]:
    """Yield a line for each variant and fold."""
    measured = measured_examples(arguments.data, family, arguments.rows)
    words = [f"family={family}", f"space={SPACES[family]}", "sampler=uniform", f"seed={VIRTUAL_SEED}"]
    virtual = list(simulated_examples(drawn_specs(words, VIRTUAL_ROWS[family]), "ablation").values())
    folds = list(folds_of(measured, arguments.folds))
    rounds = [(variant, fold) for variant in VARIANTS for fold in range(len(folds))]
    for variant, fold in tqdm(rounds, desc=family, unit="fold", mininterval=10):
        train, test = folds[fold]
        rows = rows_for(variant, train, virtual, test)
        line = {"family": family, **vars(variant), "fold": fold}
        sizes = {"members": arguments.members, "learned": len(rows), "tested": len(test), "of": len(measured)}
        width_mib = WIDTHS_MIB[family]
        figures = cache.get(
            {"study": "ablation", **line, **sizes},
            lambda v=variant, r=rows, t=test, w=width_mib: evaluate_fold(v, r, t, w, arguments.members),
        )
        yield {**figures, **line}  # in this order: `line` overrides the figure "rows"


def ablation_table(lines: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Return means over folds and the deviation of accuracy, by family, features and rows."""
    groups = pd.DataFrame(lines).groupby(["family", "features", "rows"], sort=False)
    return groups.agg(
        accuracy=("accuracy", "mean"),
        scatter=("accuracy", scatter),
        too_low=("too_low", "mean"),
        median_error=("median_relative_error", "mean"),
    ).reset_index()


def to_markdown(table: pd.DataFrame) -> str:
    """Return a table with one line per variant, and the accuracy and the share of low estimates of each family."""
    families = list(dict.fromkeys(table["family"]))
    head = ["features", "learned from", *(name for family in families for name in (family, "too low"))]
    lines = []
    for (features, rows), part in table.groupby(["features", "rows"], sort=False):
        by_family = part.set_index("family")
        cells = [
            cell
            for family in families
            for cell in (
                f"{by_family.accuracy[family]:.3f} ± {by_family.scatter[family]:.3f}",
                f"{by_family.too_low[family]:.1%}",
            )
        ]
        lines.append([features, rows, *cells])
    published = [cell for family in families for cell in ("{:.3f} / {:.3f}".format(*PUBLISHED[family]), "")]
    return markdown(head, [*lines, ["*published*", "measured, their split", *published]])


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the accuracy of each variant, one panel per family, with lines at the published figures."""
    with light_picture(path, 11, 4.2) as figure:
        for axes, family, part in family_bars(figure, table):
            names = [
                f"{item.features}, {item.rows}" if item.rows != "none" else "no learning" for item in part.itertuples()
            ]
            colours = [FEATURE_COLOURS[name] for name in part["features"]]
            axes.barh(
                names, part["accuracy"], xerr=part["scatter"], color=colours, height=0.7, ecolor="0.25", capsize=2
            )
            for value, style in zip(PUBLISHED[family], ("--", ":"), strict=True):
                axes.axvline(value, color=GREY, linestyle=style, linewidth=1.2)
            low = min(part["accuracy"].min(), *PUBLISHED[family])
            axes.set(xlim=(max(0, low - 0.12), 1.005), xlabel="share in the right bucket")
            axes.set_title(f"{family}, buckets of {WIDTHS_MIB[family] / 1000:.0f} GB", fontsize=10)
        figure.suptitle(
            "An MLP estimator by what it sees and learns from (judged on measured rows). "
            "Lines: published, MLP (dashed) and Transformer (dotted)",
            fontsize=10,
        )


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--folds", type=int, default=3, help="number of folds; the published figures use 3")
    parser.add_argument("--members", type=int, default=1, help="members of an ensemble")
    parser.add_argument("--rows", type=int, default=1500, help="maximum of measured rows per family")
    parser.add_argument("--out", type=Path, default=Path("runs/study/ablation.jsonl"), help="cached results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cache = ResultCache(arguments.out)
    table = ablation_table([line for family in arguments.families for line in study(family, arguments, cache)])
    text = to_markdown(table)
    publish(arguments, "study.ablation", text, partial(draw, table))


if __name__ == "__main__":
    main()
