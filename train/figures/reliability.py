"""Reliability diagram: predicted probabilities against observed frequencies."""

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vramcast.models.drawing import picture, quiet


def reliability_table(probabilities: NDArray[np.float64], truth: NDArray[np.int64], bins: int = 10) -> pd.DataFrame:
    """Bin rows by the probability of the likeliest bucket: mean probability, accuracy, rows. Omit empty bins."""
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == truth
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    frame = pd.DataFrame({"bin": index, "confidence": confidence, "accuracy": right})
    grouped = frame.groupby("bin")
    return grouped[["confidence", "accuracy"]].mean().assign(rows=grouped.size(), low=lambda t: t.index / bins)


def calibration_error(table: pd.DataFrame) -> float:
    """Return the expected calibration error: |confidence - accuracy|, weighted by rows."""
    distance = (table["confidence"] - table["accuracy"]).abs()
    return float((distance * table["rows"]).sum() / table["rows"].sum())


def draw_reliability(table: pd.DataFrame, title: str, path: Path, bins: int = 10) -> None:
    """Draw accuracy by confidence against the diagonal, and the rows of each bin below."""
    with picture(path, 5.2, 5.6) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        middle = table["low"] + 0.5 / bins
        upper.bar(middle, table["accuracy"], width=0.94 / bins, color="#4c78a8", label="observed")
        upper.plot(table["confidence"], table["accuracy"], "o", color="black", markersize=4, label="mean of the bin")
        upper.plot([0, 1], [0, 1], "--", color="0.4", linewidth=1, label="perfectly calibrated")
        upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share of rows in that bucket")
        upper.set_title(f"{title}\nexpected calibration error {calibration_error(table):.1%}", fontsize=10)
        upper.legend(loc="upper left", fontsize=8, framealpha=0.9)
        lower.bar(middle, table["rows"], width=0.94 / bins, color="0.6")
        lower.set(xlabel="probability of the likeliest bucket", ylabel="rows")
        for axes in (upper, lower):
            quiet(axes)
