"""How well features separate buckets: `python -m benchmarks.study.projections --data DIR`.

PCA and t-SNE of GPUMemNet's features on measured rows. The table quantifies the picture: how often the nearest
neighbours of a row are in its bucket.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors
from tqdm import tqdm

from benchmarks.page import publish, study_parser
from benchmarks.small_pictures import light_picture
from benchmarks.study.rows import FAMILIES, WIDTHS_MIB, measured_examples
from benchmarks.study.style import RED, markdown
from vramcast.models.buckets import Buckets
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.models.example import Example
from vramcast.train.figures.projections import projections_table
from vramcast.virtual_gpu.allocator.sizes import MIB

FEATURES = ("gpumemnet", "full")
NEIGHBOURS = 5
SEED = 0


def neighbours_agree(points: NDArray[np.float64], classes: NDArray[np.int64]) -> float:
    """Return the share of points whose class is the majority among their nearest neighbours."""
    neighbours = NearestNeighbors(n_neighbors=NEIGHBOURS + 1).fit(points).kneighbors(points, return_distance=False)
    right = 0
    for own, indices in enumerate(neighbours):
        others = [index for index in indices if index != own][:NEIGHBOURS]
        right += int(np.bincount(classes[others]).argmax() == classes[own])
    return right / len(points)


def largest_share(classes: NDArray[np.int64]) -> float:
    """Return the accuracy of always predicting the most frequent class."""
    return float(np.bincount(classes).max() / len(classes))


def projected(rows: list[Example], features: str, buckets: Buckets) -> tuple[pd.DataFrame, dict[str, float]]:
    """Return both projections, and how well buckets separate in each and in all dimensions."""
    matrix = ExampleEncoder.fit(rows, features).matrix(rows)
    classes = buckets.of([row.measured.used_bytes if row.measured.fits else float("inf") for row in rows])
    table = projections_table(matrix, classes, SEED)
    projected_classes = table["bucket"].to_numpy()
    return table, {
        "explained": sum(table.attrs["explained"]),
        "majority": largest_share(projected_classes),
        "PCA": neighbours_agree(table[["pca_x", "pca_y"]].to_numpy(), projected_classes),
        "t-SNE": neighbours_agree(table[["tsne_x", "tsne_y"]].to_numpy(), projected_classes),
        "all dimensions": neighbours_agree(np.asarray(matrix, dtype=np.float64), classes),
    }


def to_markdown(figures: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """Return a table with one line per family and feature set."""
    head = ["family, features", "variance in two axes", "commonest bucket", "PCA", "t-SNE", "all dimensions"]
    lines = [
        [f"{family}, {features}", f"{line['explained']:.0%}", *(f"{line[name]:.1%}" for name in list(line)[1:])]
        for (family, features), line in figures.items()
    ]
    return markdown(head, lines)


def draw(tables: Mapping[str, pd.DataFrame], buckets: Mapping[str, Buckets], path: Path) -> None:
    """Draw one column per family, PCA above t-SNE; crosses are jobs that did not fit."""
    with light_picture(path, 11, 7) as figure:
        grid = figure.subplots(2, len(tables), squeeze=False)
        for column, (family, table) in zip(grid.T, tables.items(), strict=True):
            fits = table[table["bucket"] < buckets[family].fitting]
            oom = table[table["bucket"] == buckets[family].fitting]
            bounds = np.arange(fits["bucket"].min(), fits["bucket"].max() + 2) - 0.5
            for axes, kind in zip(column, ("pca", "tsne"), strict=True):
                dots = axes.scatter(
                    fits[f"{kind}_x"], fits[f"{kind}_y"], c=fits["bucket"], s=9, linewidths=0, cmap="viridis",
                    norm=BoundaryNorm(bounds, 256),
                )  # fmt: skip
                axes.scatter(oom[f"{kind}_x"], oom[f"{kind}_y"], marker="x", s=13, linewidths=0.8, color=RED)
                axes.set(xticks=[], yticks=[])
            width = WIDTHS_MIB[family] / 1000
            explained = table.attrs["explained"]
            column[0].set_title(f"{family}: {len(table)} rows, buckets of {width:.0f} GB", fontsize=10)
            column[0].set_xlabel(f"first component, {explained[0]:.0%} of the variance", fontsize=8)
            column[0].set_ylabel(f"PCA: second component, {explained[1]:.0%}", fontsize=8)
            column[1].set_ylabel("t-SNE (no unit)", fontsize=8)
            ticks = range(int(fits["bucket"].min()), int(fits["bucket"].max()) + 1)
            bar = figure.colorbar(dots, ax=column[1], orientation="horizontal", ticks=list(ticks), pad=0.03)
            bar.ax.set_xticklabels([f"{tick * width:.0f}-{(tick + 1) * width:.0f}" for tick in ticks], fontsize=7)
            bar.set_label("measured memory [1000 MiB]" + ("; crosses: did not fit" if len(oom) else ""), fontsize=8)
        figure.suptitle("The published features of measured rows, by bucket", fontsize=11)


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    figures, tables, buckets = {}, {}, {}
    for family in tqdm(FAMILIES, unit="family"):
        rows = measured_examples(arguments.data, family)
        buckets[family] = Buckets(WIDTHS_MIB[family] * MIB, rows[0].capacity_bytes)
        for features in FEATURES:
            table, figures[family, features] = projected(rows, features, buckets[family])
            tables.setdefault(family, table)
    text = to_markdown(figures)
    publish(arguments, "study.projections", text, partial(draw, tables, buckets))


if __name__ == "__main__":
    main()
