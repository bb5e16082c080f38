"""Confusion matrix: predicted buckets against true ones."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets
from vramcast.models.drawing import picture
from vramcast.train.figures.drawing import bucket_names, unit_of

_MOST_WITH_NUMBERS = 24
"""Cells show their counts up to this many classes."""
_MOST_TICKS = 24


def confusion_table(truth: NDArray[np.int64], predicted: NDArray[np.int64], buckets: Buckets) -> pd.DataFrame:
    """Return counts, indexed [true, predicted] by bucket name, from the lowest bucket that occurs to the highest."""
    names = bucket_names(buckets)
    counts = np.zeros((buckets.classes, buckets.classes), dtype=np.int64)
    np.add.at(counts, (truth, predicted), 1)
    occurring = np.concatenate([truth, predicted])
    fitting = occurring[occurring < buckets.fitting]
    shown = list(range(fitting.min(), fitting.max() + 1)) if fitting.size else []
    shown += [buckets.fitting] if (occurring == buckets.fitting).any() else []
    chosen = [names[index] for index in shown]
    return pd.DataFrame(counts[np.ix_(shown, shown)], index=chosen, columns=chosen)


def draw_confusion(table: pd.DataFrame, buckets: Buckets, title: str, path: Path) -> None:
    """Draw one square per cell, coloured by its share of the true bucket's rows."""
    counts = table.to_numpy()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes, unit = len(table), unit_of(buckets)[0]
    side = min(max(4.5, 2.2 + 0.42 * classes), 11)
    with picture(path, side + 0.9, side) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for index in range(classes):  # outline the diagonal, where predictions are right
            axes.add_patch(Rectangle((index - 0.5, index - 0.5), 1, 1, fill=False, edgecolor="0.75", linewidth=0.7))
        step = -(-classes // _MOST_TICKS)
        ticks = sorted({*range(0, classes, step), classes - 1} - set(range(classes - step, classes - 1)))
        axes.set_xticks(ticks, [table.columns[tick] for tick in ticks], rotation=90, fontsize=8)
        axes.set_yticks(ticks, [table.index[tick] for tick in ticks], fontsize=8)
        axes.set_xlabel(f"likeliest bucket by the estimator [{unit}]")
        axes.set_ylabel(f"true bucket [{unit}]")
        axes.set_title(title, fontsize=10)
        figure.colorbar(image, ax=axes, shrink=0.75, label="share of the true bucket's rows")
        if classes <= _MOST_WITH_NUMBERS:
            for row, column in zip(*np.nonzero(counts), strict=True):
                colour = "white" if shares[row, column] > 0.55 else "0.15"
                axes.text(column, row, counts[row, column], ha="center", va="center", fontsize=7, color=colour)
