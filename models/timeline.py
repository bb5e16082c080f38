"""The memory of a training run over time, as a table and as a picture."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vramcast.errors import UserError
from vramcast.simulation.result import Curve
from vramcast.virtual_gpu.allocator.sizes import MIB

_GIB = 1024 * MIB
CURVE_ORDER = ("parameters", "optimizer_state", "gradients", "inputs", "activations", "workspace", "temporaries")
"""Uses in the order in which a picture stacks them."""
_COLOURS = {
    "context": "#bab0ac", "parameters": "#4c78a8", "optimizer_state": "#b279a2", "gradients": "#72b7b2",
    "inputs": "#9d755d", "workspace": "#e45756", "activations": "#54a24b", "temporaries": "#eeca3b",
}  # fmt: skip
_SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class TimelineTable:
    """Memory after some events of a run, in GiB, as stacked layers from the context up."""

    layers: dict[str, NDArray[np.float64]]
    reserved: NDArray[np.float64]
    """With the context, as the device counts it."""
    capacity: float


def timeline_table(curve: Curve) -> TimelineTable:
    """Return the layers in stacking order, without empty ones."""
    points = len(curve.reserved_bytes)
    layers = {"context": np.full(points, curve.context_bytes / _GIB)}
    for name in CURVE_ORDER:
        values = np.asarray(curve.requested_bytes.get(name, [0] * points), dtype=np.float64) / _GIB
        if values.any():
            layers[name] = values
    reserved = (np.asarray(curve.reserved_bytes, dtype=np.float64) + curve.context_bytes) / _GIB
    return TimelineTable(layers, reserved, curve.capacity_bytes / _GIB)


def check_picture(path: Path) -> None:
    """Raise a UserError if the picture cannot be written, before the simulation starts."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"expected a picture's name that ends in one of {list(_SUFFIXES)}, found {path}: change it")
    if not path.parent.is_dir():
        raise UserError(f"expected a directory for the picture at {path.parent}, found none: make it")


def draw_timeline(table: TimelineTable, title: str, path: Path) -> None:
    """Draw the memory over the events of a run, the reserved memory, and the capacity."""
    from vramcast.models.drawing import picture, quiet  # noqa: PLC0415 - imports matplotlib

    with picture(path, 9, 4.8) as figure:
        axes = figure.add_subplot()
        events = np.arange(len(table.reserved))
        names = [name.replace("_", " ") for name in table.layers]
        colours = [_COLOURS[name] for name in table.layers]
        axes.stackplot(events, *table.layers.values(), labels=names, colors=colours, step="post")
        axes.step(events, table.reserved, where="post", color="black", linewidth=1, label="reserved by torch")
        if table.capacity < 2 * table.reserved.max():
            axes.axhline(table.capacity, color="#e45756", linestyle="--", linewidth=1.2, label="capacity of the device")
        axes.set(xlabel="events of allocation, from the first step on", ylabel="memory on the device [GiB]")
        axes.set(xlim=(0, max(len(events) - 1, 1)), ylim=(0, None))
        axes.set_title(title, fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        quiet(axes)
