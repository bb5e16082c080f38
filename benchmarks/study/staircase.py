"""Growth of memory with width: `python -m benchmarks.study.staircase --data DIR`.

Simulates MLPs of equal layers at every width on the A100 of the public set, and compares with its measurements.
Requested memory grows smoothly; reserved memory, which is what nvidia-smi measures, grows in steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.page import publish, study_parser
from benchmarks.small_pictures import light_picture
from benchmarks.study.rows import PROFILE, SIMULATIONS, WORKERS
from benchmarks.study.style import BLUE, GREEN, GREY, ORANGE, markdown
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.device.profiles import load_profile
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.models.drawing import quiet
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

TABLE = "mlp_data_step1.csv"
DEPTHS = (2, 6, 10)
BATCH, OUTPUTS = 256, 10
COARSE = range(16, 4097, 16)
WINDOWS = {
    "weights below 1 MiB, in segments of 2 MiB": range(300, 400),
    "weights of 1 to 10 MiB, in segments of 20 MiB": range(1000, 1400),
    "weights above 10 MiB, in steps of 2 MiB": range(3000, 3300),
}
"""Ranges simulated width by width: c10/cuda/CUDACachingAllocator.cpp, kSmallSize, kMinLargeAlloc, kRoundLarge."""
WINDOW_DEPTH = 6
COLOURS = dict(zip(DEPTHS, (GREEN, ORANGE, BLUE), strict=True))


def uniform_mlp(width: int, depth: int) -> Spec:
    """Return the spec of an MLP of equal layers, as in the public set."""
    network = {"arch": "uniform", "input_features": width, "output_features": OUTPUTS, "depth": depth}
    return make_spec("mlp", network, TrainingSetup(batch_size=BATCH, dry_run_batch_size=2))


def sweeps_table(sweeps: Mapping[str, tuple[int, Iterable[int]]]) -> pd.DataFrame:
    """Simulate sweeps of widths; return requested, reserved and used MiB."""
    specs = {
        (name, depth, width): uniform_mlp(width, depth) for name, (depth, widths) in sweeps.items() for width in widths
    }
    simulations = SimulationStore(SIMULATIONS / "staircase", WORKERS).measure(specs.values(), load_profile(PROFILE))
    lines = []
    for key, spec in specs.items():
        peaks = simulations[spec.id]
        figures = (peaks.requested_bytes or 0, peaks.reserved_bytes or 0, peaks.peak_bytes or 0)
        lines.append((*key, *(figure / MIB for figure in figures)))
    return pd.DataFrame(lines, columns=["sweep", "depth", "width", "requested_mib", "reserved_mib", "used_mib"])


def steps(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the lengths of the complete treads and the heights of the steps."""
    changes = [place for place, (a, b) in enumerate(pairwise(values), 1) if a != b]
    return [b - a for a, b in pairwise(changes)], [values[place] - values[place - 1] for place in changes]


def steps_line(name: str, sweep: pd.DataFrame) -> list[str]:
    """Return the table's line for a window of consecutive widths."""
    treads, heights = steps(sweep["reserved_mib"].tolist())
    slope = (sweep["requested_mib"].iloc[-1] - sweep["requested_mib"].iloc[0]) / (len(sweep) - 1)
    span = f"{sweep['width'].iloc[0]}-{sweep['width'].iloc[-1]}"
    lengths = [f"{np.median(treads):.0f}", f"{max(treads)}"] if treads else ["-", "-"]
    largest = f"{max(map(abs, heights), default=0):.0f} MiB"
    falls = str(sum(height < 0 for height in heights))
    return [name, span, f"{slope:.2f} MiB", str(len(heights)), *lengths, largest, falls]


def measured_table(data: Path) -> pd.DataFrame:
    """Return shape, measured and simulated memory of the rows of the first MLP set."""
    path = next(data.rglob(TABLE))
    rows = [row for row in read_rows(path) if row.measurement.status is Status.OK]
    profile = load_profile(PROFILE)
    simulations = SimulationStore(None, WORKERS).measure([row.spec for row in rows], profile)
    lines = [
        (row.spec.network["arch"], row.spec.network["depth"], row.spec.network["input_features"],
         (row.measurement.peak_bytes or 0) // MIB, (simulations[row.spec.id].peak_bytes or 0) // MIB)
        for row in rows if row.spec.id in simulations
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=["arch", "depth", "width", "used_mib", "simulated_mib"])


def grid_sentence(measured: pd.DataFrame, overhead_mib: int) -> str:
    """Describe how the measured figures lie on the allocator's grid."""
    own = measured["used_mib"] - overhead_mib
    error = (measured["used_mib"] - measured["simulated_mib"]).abs()
    return (
        f"{(own % 2 == 0).mean():.1%} of {len(measured)} measured figures are {overhead_mib} MiB and a multiple of "
        f"2 MiB; they take {measured['used_mib'].nunique()} values. The simulation gives {(error == 0).mean():.1%} of "
        f"them exactly, and {(error <= 20).mean():.1%} within 20 MiB."
    )


def draw(sweeps: pd.DataFrame, windows: dict[str, pd.DataFrame], measured: pd.DataFrame, path: Path) -> None:
    """Draw the whole range with the measured rows, and below it the three kinds of steps."""
    overhead = float((sweeps["used_mib"] - sweeps["reserved_mib"]).iloc[0])
    with light_picture(path, 10.5, 7.4) as figure:
        upper, lower = figure.subfigures(2, 1, height_ratios=[1.35, 1])
        axes = upper.add_subplot()
        for depth, sweep in sweeps.groupby("depth"):
            colour = COLOURS[int(depth)]
            _draw_steps(axes, sweep, "mid", colour, f"{depth} equal layers")
            points = measured[(measured["arch"] == "uniform") & (measured["depth"] == depth)]
            axes.plot(
                points["width"], points["used_mib"], "o", color=colour, markersize=4, alpha=0.75, markeredgewidth=0
            )
        for edge in range(2000, int(sweeps["used_mib"].max()), 1000):
            axes.axhline(edge, color="0.85", linewidth=0.8, zorder=0)
        axes.plot([], [], "o", color=GREY, markersize=4, label="measured, other batches and outputs")
        axes.set(xlabel="width of every layer", ylabel="device memory [MiB]")
        axes.set_title(
            "MLPs on an A100: simulated (lines, batch 256), measured by others (dots); grey: buckets of 1000 MiB",
            fontsize=10,
        )
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        for panel, (name, sweep) in zip(lower.subplots(1, len(windows)), windows.items(), strict=True):
            _draw_steps(panel, sweep, "post", BLUE, "reserved: what is measured")
            panel.plot(
                sweep["width"],
                sweep["requested_mib"] + overhead,
                color=GREY,
                linestyle="--",
                linewidth=1.3,
                label="asked for by tensors",
            )
            panel.set(xlabel="width", ylabel="device memory [MiB]")
            panel.set_title(name, fontsize=8.5)
            quiet(panel)
        lower.axes[1].legend(fontsize=8, frameon=False, loc="lower right")
        lower.suptitle(f"Single widths, {WINDOW_DEPTH} equal layers, simulated", fontsize=10)


def _draw_steps(axes: Axes, sweep: pd.DataFrame, where: Literal["mid", "post"], colour: str, label: str) -> None:
    axes.step(sweep["width"], sweep["used_mib"], where=where, color=colour, linewidth=1.3, label=label)


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    whole = {f"{depth} layers": (depth, COARSE) for depth in DEPTHS}
    table = sweeps_table({**whole, **{name: (WINDOW_DEPTH, widths) for name, widths in WINDOWS.items()}})
    sweeps = table[table["sweep"].isin(whole)]
    windows = {name: table[table["sweep"] == name] for name in WINDOWS}
    measured = measured_table(Path(arguments.data))
    head = ["where", "widths", "asked for, a width", "steps", "median tread", "longest", "largest step", "of them down"]
    text = markdown(head, [steps_line(name, sweep) for name, sweep in windows.items()])
    text += "\n\n" + grid_sentence(measured, round(float((sweeps["used_mib"] - sweeps["reserved_mib"]).iloc[0])))
    publish(arguments, "study.staircase", text, partial(draw, sweeps, windows, measured))


if __name__ == "__main__":
    main()
