"""Projections of the features to two dimensions, coloured by bucket: shows how well features separate buckets."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from vramcast.models.buckets import Buckets
from vramcast.models.drawing import picture
from vramcast.train.figures.drawing import DOES_NOT_FIT, bucket_names, unit_of

MOST_POINTS = 600
"""t-SNE takes seconds for this many points, and more points make the picture no clearer."""
_LEAST_POINTS = 4
_MOST_TICKS = 12
_NOISE = 1e-9


def projections_table(features: NDArray[np.float64], classes: NDArray[np.int64], seed: int) -> pd.DataFrame:
    """Project at most `MOST_POINTS` rows; the columns are `pca_x`, `pca_y`, `tsne_x`, `tsne_y`, `bucket`.

    `attrs["explained"]` is the share of the variance on the two axes of the PCA.
    """
    if len(features) < _LEAST_POINTS:
        raise ValueError(f"expected at least {_LEAST_POINTS} points to project, found {len(features)}")
    chosen = np.random.RandomState(seed).permutation(len(features))[:MOST_POINTS]
    points = features[np.sort(chosen)]
    scaled = _standardised(points)
    components = min(30, *scaled.shape)
    pca = PCA(n_components=components, random_state=seed).fit(scaled)
    reduced = _two_columns(pca.transform(scaled))
    tsne = TSNE(perplexity=min(30, (len(points) - 1) / 3), init="pca", max_iter=500, random_state=seed).fit_transform(
        reduced
    )
    table = pd.DataFrame(
        {"pca_x": reduced[:, 0], "pca_y": reduced[:, 1], "tsne_x": tsne[:, 0], "tsne_y": tsne[:, 1]},
    ).assign(bucket=classes[np.sort(chosen)])
    table.attrs["explained"] = [float(share) for share in pca.explained_variance_ratio_[:2]]
    return table


def _standardised(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standardise columns; drop those that are constant up to rounding, whose deviation would be noise."""
    mean, deviation = points.mean(axis=0), points.std(axis=0)
    varies = deviation > _NOISE * (1 + np.abs(mean))
    return np.asarray((points[:, varies] - mean[varies]) / deviation[varies])


def _two_columns(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pad features that vary in one direction alone to two columns."""
    return points if points.shape[1] > 1 else np.hstack([points, np.zeros_like(points)])


def draw_projections(table: pd.DataFrame, buckets: Buckets, title: str, path: Path) -> None:
    """Draw PCA and t-SNE side by side; crosses are jobs that do not fit."""
    fits = table[table["bucket"] < buckets.fitting]
    oom = table[table["bucket"] == buckets.fitting]
    lowest, highest = (int(fits["bucket"].min()), int(fits["bucket"].max())) if len(fits) else (0, 0)
    bounds = np.arange(lowest, highest + 2) - 0.5
    with picture(path, 11, 4.8) as figure:
        both = figure.subplots(1, 2)
        for axes, kind in zip(both, ("pca", "tsne"), strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            options = {"s": 11, "linewidths": 0, "alpha": 0.85, "cmap": "viridis"}
            norm = BoundaryNorm(bounds, 256) if len(bounds) > 2 else None
            axes.scatter(fits[f"{kind}_x"], fits[f"{kind}_y"], c=fits["bucket"], norm=norm, **options)
            axes.scatter(
                oom[f"{kind}_x"],
                oom[f"{kind}_y"],
                marker="x",
                s=18,
                linewidths=0.9,
                color="#d62728",
                label=DOES_NOT_FIT,
            )
        _name_axes(both, table)
        if len(oom):
            both[1].legend(loc="best", fontsize=8, framealpha=0.9)
        figure.suptitle(title, fontsize=11)
        step = -(-(highest - lowest + 1) // _MOST_TICKS)
        ticks = list(range(lowest, highest + 1, step))
        bar = figure.colorbar(
            both[0].collections[0], ax=both, shrink=0.9, ticks=ticks, label=f"true bucket [{unit_of(buckets)[0]}]"
        )
        bar.ax.set_yticklabels([bucket_names(buckets)[tick] for tick in ticks], fontsize=8)


def _name_axes(both: "NDArray[np.object_]", table: pd.DataFrame) -> None:
    explained = [*table.attrs.get("explained", []), 0.0, 0.0]
    both[0].set_title("PCA", fontsize=10)
    both[0].set_xlabel(f"first component ({explained[0]:.0%} of the variance)", fontsize=9)
    both[0].set_ylabel(f"second component ({explained[1]:.0%})", fontsize=9)
    both[1].set_title("t-SNE", fontsize=10)
    both[1].set_xlabel("no unit: only neighbourhoods are meaningful", fontsize=9)
