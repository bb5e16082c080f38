"""Learning curves: losses by epoch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from vramcast.models.drawing import picture, quiet

COLUMNS = ["member", "epoch", "train_loss", "validation_loss"]
_COLOURS = {"train_loss": "#4c78a8", "validation_loss": "#e45756"}


def curves_table(history: Mapping[str, Sequence[Mapping[str, float]]]) -> pd.DataFrame:
    """Return one line per member and epoch of a fitter's history."""
    lines = [{"member": member, **epoch} for member, epochs in history.items() for epoch in epochs]
    return pd.DataFrame(lines, columns=COLUMNS).sort_values(["member", "epoch"], ignore_index=True)


def draw_curves(table: pd.DataFrame, title: str, path: Path) -> None:
    """Draw training and validation losses of every member, and mark each member's best epoch."""
    with picture(path, 7, 4.2) as figure:
        axes = figure.add_subplot()
        for number, (_, curve) in enumerate(table.groupby("member", sort=False)):
            for column, colour in _COLOURS.items():
                label = column.replace("_", " ") if number == 0 else None
                axes.plot(curve["epoch"], curve[column], color=colour, linewidth=1.2, alpha=0.8, label=label)
            best = curve.iloc[int(curve["validation_loss"].to_numpy().argmin())]
            label = "best epoch" if number == 0 else None
            axes.plot(best["epoch"], best["validation_loss"], "o", color="black", markersize=5, label=label)
        axes.set(xlabel="epoch", ylabel="loss [nats per row]", ylim=_limits(table))
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8)
        quiet(axes)


def _limits(table: pd.DataFrame) -> tuple[float, float]:
    """Return limits without the peaks of the first epochs, which would flatten the rest."""
    losses = pd.concat([table["train_loss"], table["validation_loss"]]).dropna()
    low, high = losses.min(), losses.quantile(0.97)
    margin = 0.08 * max(high - low, 1e-3)
    return float(low - margin), float(high + margin)
