"""Shared style of the study's tables and pictures."""

from collections.abc import Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vramcast.models.drawing import quiet

GREY = "0.45"
BLUE, ORANGE, GREEN, RED, VIOLET = "#4c78a8", "#f28e2b", "#59a14f", "#d1495b", "#8d6cab"
FEATURE_COLOURS = {"gpumemnet": ORANGE, "layers": VIOLET, "full": BLUE, "virtual GPU": GREEN}


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def family_bars(figure: Figure, table: pd.DataFrame, sharex: bool = False) -> Iterator[tuple[Axes, str, pd.DataFrame]]:
    """Yield one panel per family for horizontal bars, with its lines in reverse, because bars stack upwards."""
    families = list(dict.fromkeys(table["family"]))
    panels = figure.subplots(1, len(families), sharey=True, sharex=sharex, squeeze=False)[0]
    for axes, family in zip(panels, families, strict=True):
        quiet(axes)
        axes.grid(axis="y", visible=False)
        yield axes, family, table[table["family"] == family].iloc[::-1]


def scatter(values: "pd.Series[float]") -> float:
    """Return the standard deviation over folds or seeds; 0 for a single value."""
    return float(values.std()) if len(values) > 1 else 0.0
