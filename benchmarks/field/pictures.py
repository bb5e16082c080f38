"""The pictures of docs/accuracy.md. Each consists of two functions: one computes a table, one draws it.

`python -m benchmarks.field.pictures` redraws them from the results of the last run of `python -m benchmarks.field`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.field.rows import UNSEEN_2024
from benchmarks.small_pictures import light_picture
from vramcast.models.drawing import quiet

COLOURS = {
    "universal": "#1f5fbf",
    "universal, safe bucket at 1 %": "#7fb0ee",
    "virtual GPU alone": "#12a594",
    "gap regressor (TBEM)": "#6a4fb3",
    "MLP on GPUMemNet's features": "#333333",
    "ExtraTrees": "#d16ba5",
    "PyTorch's MemTracker": "#c99700",
    "FakeTensor": "#c0392b",
    "Horus": "#e67e22",
    "shape formula of the talk": "#8c6d4f",
    "weights x 4 (accelerate)": "#9aa0a6",
}
"""Each estimator has one colour in every picture: ours are cool, the others warm or grey."""
FAMILIES = {
    "mlp": ("MLPs", "#8ab4f8"),
    "cnn": ("CNNs", "#e8743b"),
    "transformer": ("Transformers", "#7b4fb3"),
    "timm": ("timm networks", "#19a979"),
    "unseen": ("unseen real networks", "#c2185b"),
}
KINDS = {
    "universal": "simulated",
    "virtual GPU alone": "simulated",
    "MLP on GPUMemNet's features": "learned",
    "gap regressor (TBEM)": "learned",
    "ExtraTrees": "learned",
}
SCATTERED = (
    "universal", "universal, safe bucket at 1 %", "virtual GPU alone", "MLP on GPUMemNet's features",
    "PyTorch's MemTracker", "FakeTensor", "Horus", "weights x 4 (accelerate)",
)  # fmt: skip
BARS = {
    "measured": ("measured (2024)", "#20242a"),
    "universal": ("ours: estimate (simulated)", "#1f5fbf"),
    "universal, safe bucket at 1 %": ("ours: safe at 1 % risk", "#9cc3f5"),
    "GPUMemNet (published)": ("GPUMemNet (published)", "#8e9aa6"),
    "FakeTensor (published)": ("FakeTensor (published)", "#c0392b"),
    "Horus (published)": ("Horus (published)", "#e67e22"),
}
_LEAST_ERROR, _MOST_ERROR = 1e-4, 10.0
_TOP_GIB = 48.0
"""The top of the bar chart; higher bars are cut and labelled with their value."""
_CAPACITY_GIB = 39.5
"""The capacity of an A100 40 GB; bars for 'does not fit' end here."""


def errors_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return relative errors of the rows that fit, by estimator and family; 'does not fit' counts as 1."""
    fitting = points[points["fits"] & points["estimator"].isin(list(COLOURS))]
    finite = np.isfinite(fitting["estimate_mib"])
    error = (fitting["estimate_mib"].where(finite, 0.0) - fitting["measured_mib"]).abs() / fitting["measured_mib"]
    return fitting.assign(error=error.where(finite, 1.0))[["estimator", "family", "error"]]


def draw_errors(table: pd.DataFrame, path: Path) -> None:
    """Draw the share of rows within each error: a panel for all rows and one for each family."""
    panels: dict[str, pd.DataFrame] = {"all rows": table}
    panels |= {title: table[table["family"] == family] for family, (title, _) in FAMILIES.items()}
    with light_picture(path, 12, 7.4) as figure:
        for index, (title, part) in enumerate(panels.items()):
            axes = figure.add_subplot(2, 3, index + 1)
            for estimator, colour in COLOURS.items():
                errors = np.sort(part.loc[part["estimator"] == estimator, "error"].to_numpy())
                if len(errors) and estimator != "universal, safe bucket at 1 %":
                    _draw_share(axes, errors, estimator, colour)
            _error_axes(axes, title, index)
        handles = [
            Line2D([], [], color=colour, linewidth=_width(name), label=_label(name))
            for name, colour in COLOURS.items()
            if name != "universal, safe bucket at 1 %"
        ]
        figure.suptitle(
            "How near estimates come to measured memory (truth: measured by others on real GPUs)", fontsize=12
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def _draw_share(axes: Any, errors: np.ndarray, estimator: str, colour: str) -> None:
    shares = np.arange(1, len(errors) + 1) / len(errors)
    xs = np.concatenate([[_LEAST_ERROR], np.clip(errors, _LEAST_ERROR, _MOST_ERROR)])
    front = 5 if estimator == "universal" else 3
    axes.step(xs, np.concatenate([[0], shares]), where="post", color=colour, linewidth=_width(estimator), zorder=front)


def _width(estimator: str) -> float:
    return {"universal": 2.8, "virtual GPU alone": 2.0}.get(estimator, 1.3)


def _label(estimator: str) -> str:
    """Return the estimator's name, with the kind of its figure where the name does not show it."""
    return f"{estimator} ({KINDS[estimator]})" if estimator in KINDS else estimator


def _error_axes(axes: Any, title: str, index: int) -> None:
    axes.set_xscale("log")
    axes.set_xlim(_LEAST_ERROR, _MOST_ERROR)
    axes.set_ylim(0, 1.01)
    axes.xaxis.set_major_locator(FixedLocator([1e-4, 1e-3, 1e-2, 1e-1, 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    axes.set_title(title, fontsize=10.5, loc="left")
    _label_edges(axes, index, 3, "relative error, at most", "share of rows")
    quiet(axes)


def _label_edges(axes: Any, index: int, columns: int, xlabel: str, ylabel: str) -> None:
    """Label only the lower and the left panels of two rows."""
    if index >= columns:
        axes.set_xlabel(xlabel)
    if index % columns == 0:
        axes.set_ylabel(ylabel)


def scatter_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return measured and estimated GiB of the rows that fit; 'does not fit' is drawn at the device's capacity."""
    chosen = points[points["fits"] & points["estimator"].isin(SCATTERED)]
    finite = np.isfinite(chosen["estimate_mib"])
    return chosen.assign(
        measured_gb=chosen["measured_mib"] / 1024,
        estimate_gb=chosen["estimate_mib"].where(finite, chosen["capacity_mib"]) / 1024,
        refused=~finite,
    )[["estimator", "family", "measured_gb", "estimate_gb", "refused"]]


def draw_scatter(table: pd.DataFrame, path: Path) -> None:
    """Draw estimates over measurements, one panel per estimator, with logarithmic axes."""
    low, high = 0.05, 60.0
    with light_picture(path, 12, 6.9) as figure:
        for index, estimator in enumerate(SCATTERED):
            axes = figure.add_subplot(2, 4, index + 1)
            axes.plot([low, high], [low, high], color="0.55", linewidth=1, zorder=1)
            for family, (_, colour) in FAMILIES.items():
                part = table[(table["estimator"] == estimator) & (table["family"] == family)]
                for refused, marker in ((False, "o"), (True, "^")):
                    shown = part[part["refused"] == refused]
                    axes.scatter(
                        shown["measured_gb"], shown["estimate_gb"].clip(low, high), s=9, marker=marker, color=colour,
                        alpha=0.65, linewidths=0, zorder=3 if family != "unseen" else 4,
                    )  # fmt: skip
            _scatter_axes(axes, estimator, index, (low, high))
        handles = [
            Line2D([], [], color=colour, marker="o", linestyle="", markersize=6, label=name)
            for name, colour in FAMILIES.values()
        ]
        handles.append(Line2D([], [], color="0.4", marker="^", linestyle="", markersize=6, label="predicted: no fit"))
        figure.suptitle(
            "Estimated against measured memory (measured by others on real GPUs; rows that fit)", fontsize=12
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def _scatter_axes(axes: Any, title: str, index: int, limits: tuple[float, float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1, limits[1])
    axes.set_ylim(*limits)
    for axis, ticks in ((axes.xaxis, [1, 2, 5, 10, 20, 40]), (axes.yaxis, [0.1, 1, 2, 5, 10, 20, 40])):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_title(_label(title), fontsize=8.5, loc="left")
    _label_edges(axes, index, 4, "measured [GiB]", "estimated [GiB]")
    quiet(axes)


def unseen_table_of(points: pd.DataFrame) -> pd.DataFrame:
    """Return the height of each bar in GiB, one line per job; infinity means "does not fit"."""
    chosen = points[points["shown"].str.contains(UNSEEN_2024, regex=False)]
    chosen = chosen.assign(job=chosen["name"] + "\n" + chosen["batch"].astype(str))
    order = list(dict.fromkeys(chosen["job"]))
    bars = chosen.pivot_table(index="job", columns="estimator", values="estimate_mib", aggfunc="first")
    measured = chosen.groupby("job")["measured_mib"].first()
    return bars.assign(measured=measured).reindex(index=order, columns=list(BARS)) / 1024


def draw_unseen(table: pd.DataFrame, path: Path) -> None:
    """Draw the published bar chart together with our estimates: two rows of jobs, six bars each."""
    half = -(-len(table) // 2)
    with light_picture(path, 13, 7.2) as figure:
        for index, part in enumerate((table.iloc[:half], table.iloc[half:])):
            axes = figure.add_subplot(2, 1, index + 1)
            _draw_bars(axes, part)
            axes.set_xlim(-0.55, half - 0.45)
        handles = [Line2D([], [], color=colour, linewidth=8, label=name) for name, colour in BARS.values()]
        figure.suptitle("Real networks that nothing was trained on, GPUMemNet's A100 stack of 2024", fontsize=12)
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def _draw_bars(axes: Any, part: pd.DataFrame) -> None:
    width = 0.84 / len(BARS)
    places = np.arange(len(part))
    for index, (column, (_, colour)) in enumerate(BARS.items()):
        values = part[column].to_numpy(dtype=float)
        at = places + (index - (len(BARS) - 1) / 2) * width
        heights = np.where(np.isinf(values), _CAPACITY_GIB, np.minimum(np.nan_to_num(values), _TOP_GIB))
        axes.bar(at, heights, width * 0.94, color=colour)
        for place, value in zip(at, values, strict=True):
            if value > _TOP_GIB:
                text = f"{value:.0f}" if np.isfinite(value) else "does not fit"
                angle = 0 if np.isfinite(value) else 90
                height = _TOP_GIB + 0.6 if np.isfinite(value) else _CAPACITY_GIB + 0.6
                axes.text(place, height, text, ha="center", va="bottom", fontsize=8, color=colour, rotation=angle)
    axes.set_xticks(places, part.index, fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, _TOP_GIB + 5)
    axes.set_ylabel("GPU memory [GiB]")
    axes.set_xlabel("network, and batch size below it", fontsize=8.5, color="0.35")
    quiet(axes)
    axes.grid(visible=False, axis="x")


DRAWINGS: Mapping[str, Any] = {
    "field_errors.png": (errors_table, draw_errors),
    "field_scatter.png": (scatter_table, draw_scatter),
    "field_unseen.png": (unseen_table_of, draw_unseen),
}


def draw_all(points: pd.DataFrame, directory: Path) -> None:
    for name, (compute, draw) in DRAWINGS.items():
        draw(compute(points), directory / name)


if __name__ == "__main__":
    draw_all(pd.read_csv("runs/field/points.csv", keep_default_na=False, na_values=["nan"]), Path("docs"))
