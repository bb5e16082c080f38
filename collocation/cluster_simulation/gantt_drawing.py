"""Draws the Gantt chart. The only module of the package that imports matplotlib, and imported only for a chart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Patch

from vramcast.collocation.cluster_simulation.gantt_table import GanttBar
from vramcast.errors import UserError
from vramcast.models.drawing import picture, quiet

MOST_GPUS = 32
"""More would be too thin to see."""
_HOUR_S = 3600
_GIB = 2**30
_CRASHED = "#d62728"
_LANE_INCHES = 0.13


def draw_gantt(charts: Mapping[str, Sequence[GanttBar]], capacity_bytes: int, title: str, path: Path) -> None:
    """Draw a panel for each estimator over a common time axis; the colour of a bar is the true peak of its job."""
    lanes = {name: _lanes(bars) for name, bars in charts.items()}
    if any(len(gpus) > MOST_GPUS for gpus in lanes.values()):
        raise UserError(f"expected at most {MOST_GPUS} GPUs in a chart, found more: leave --gantt out")
    heights = [sum(gpus.values()) * _LANE_INCHES + 0.55 for gpus in lanes.values()]
    with picture(path, 11, sum(heights) + 1.1) as figure:
        panels: Any = figure.subplots(len(charts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        scale = ScalarMappable(Normalize(0, capacity_bytes / _GIB), colormaps["YlGnBu"])
        for axes, (name, bars) in zip(panels, charts.items(), strict=True):
            _panel(axes, name, bars, lanes[name], scale)
        last_s = max(bar.end_s for bars in charts.values() for bar in bars)
        panels[-1].set(xlabel="hours since the first arrival", xlim=(0, last_s / _HOUR_S * 1.01))
        figure.suptitle(title, fontsize=11)
        figure.colorbar(scale, ax=list(panels), label="true peak of the job [GiB]", fraction=0.03, pad=0.01, aspect=40)
        figure.legend(handles=_legend(), loc="outside lower right", ncols=2, fontsize=8, frameon=False)


def _legend() -> list[Patch]:
    alone = Patch(fill=False, hatch="////", label="alone, after a crash")
    return [Patch(facecolor=_CRASHED, label="ran out of memory"), alone]


def _lanes(bars: Sequence[GanttBar]) -> dict[int, int]:
    """Return the number of lanes of each GPU."""
    lanes: dict[int, int] = {}
    for bar in bars:
        lanes[bar.gpu] = max(lanes.get(bar.gpu, 0), bar.lane + 1)
    return dict(sorted(lanes.items()))


def _panel(axes: Any, name: str, bars: Sequence[GanttBar], lanes: Mapping[int, int], scale: Any) -> None:
    base, total = {}, 0
    for gpu, count in lanes.items():
        base[gpu] = total
        total += count
        axes.axhline(total, color="0.35", linewidth=0.8)
    for bar in bars:
        colour = _CRASHED if bar.crashed else scale.to_rgba(bar.peak_bytes / _GIB)
        axes.broken_barh(
            [(bar.start_s / _HOUR_S, (bar.end_s - bar.start_s) / _HOUR_S)],
            (base[bar.gpu] + bar.lane + 0.08, 0.84),
            facecolor=colour,
            edgecolor=_CRASHED if bar.crashed else "0.35",
            linewidth=2.0 if bar.crashed else 0.5,  # a crash takes seconds of hours
            hatch="////" if bar.exclusive and not bar.crashed else None,
            zorder=3 if bar.crashed else 2,
        )
    axes.set_yticks(
        [base[gpu] + count / 2 for gpu, count in lanes.items()], [f"GPU {gpu}" for gpu in lanes], fontsize=8
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(total, 0)
    end_s, crashes = max(bar.end_s for bar in bars), len({(bar.job, bar.start_s) for bar in bars if bar.crashed})
    axes.axvline(end_s / _HOUR_S, color="0.2", linewidth=1, linestyle="--")
    axes.set_title(
        f"{name}: {end_s / _HOUR_S:.2f} h, {crashes or 'no'} crash{'es' if crashes != 1 else ''}",
        fontsize=9,
        loc="left",
    )
    quiet(axes)
    axes.grid(visible=False, axis="y")
