"""The picture of docs/growth.md."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.performance.growth.fitting import fit_growth
from benchmarks.performance.growth.measuring import figures_of
from benchmarks.small_pictures import light_picture
from vramcast.models.drawing import quiet

PANELS = (
    ("layers", "seconds", "layers", "trace, CPU seconds"),
    ("parameters", "seconds", "parameters", "trace, CPU seconds"),
    ("batch", "seconds", "batch size (ResNet-50)", "trace, CPU seconds"),
    ("cores", "rows_a_second", "cores", "build, rows per second"),
    ("layers", "grown_mib", "layers", "memory of the trace [MiB]"),
    ("parameters", "grown_mib", "parameters", "memory of the trace [MiB]"),
    ("batch", "grown_mib", "batch size (ResNet-50)", "memory of the trace [MiB]"),
    ("connections", "p50_ms", "connections", "service, latency [ms]"),
)
_COLOURS = {
    "seconds": "#1f5fbf", "grown_mib": "#12a594", "rows_a_second": "#6a4fb3", "p50_ms": "#e67e22", "p99_ms": "#c0392b",
}  # fmt: skip


def draw_growth(table: pd.DataFrame, path: Path) -> None:
    """Draw one panel per cost: dots are measurements, lines the fitted laws."""
    with light_picture(path, 13, 6.4) as figure:
        for index, (kind, name, xlabel, ylabel) in enumerate(PANELS):
            axes = figure.add_subplot(2, 4, index + 1)
            if not figures_of(table, kind, name)[0]:
                axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
            elif kind == "cores":
                _draw_cores(axes, *figures_of(table, kind, name))
            else:
                for curve in (name, "p99_ms") if name == "p50_ms" else (name,):
                    _draw_curve(axes, *figures_of(table, kind, curve), curve)
                _log(axes, kind)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)
            quiet(axes)
        figure.suptitle(
            "How cost grows: dots are timed on a CPU without a GPU, lines are the fitted law a + b x^p", fontsize=12
        )


def _draw_curve(axes: Any, xs: list[float], ys: list[float], name: str) -> None:
    law, colour = fit_growth(xs, ys), _COLOURS[name]
    along = np.geomspace(min(xs), max(xs), 100)
    label = f"{name.removesuffix('_ms')}, p = {law.exponent:.2f}" if name.endswith("_ms") else f"p = {law.exponent:.2f}"
    axes.plot(along, law.at(along), color=colour, linewidth=1.6, alpha=0.6)
    axes.scatter(xs, ys, color=colour, s=26, zorder=3, label=label)
    axes.legend(loc="upper left", frameon=False, handletextpad=0.2)


def _log(axes: Any, kind: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 8 * low:  # do not let the noise of a flat curve fill the panel
        axes.set_ylim(low / 3, high * 3)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=5 if kind == "parameters" else 9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.25)


def _draw_cores(axes: Any, xs: list[float], ys: list[float]) -> None:
    bars = axes.bar([f"{x:.0f}" for x in xs], ys, width=0.5, color=_COLOURS["rows_a_second"])
    axes.bar_label(bars, [f"{y:.2g}" for y in ys], padding=2)
    if len(xs) > 1:
        axes.set_title(f"p = {fit_growth(xs, ys).exponent:.2f}", fontsize=10)
    axes.margins(y=0.15)
