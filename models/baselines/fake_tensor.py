"""A FakeTensor pass: the peak of what forward and backward create, counted by a dispatch mode."""

import csv
from collections.abc import Mapping
from pathlib import Path

from vramcast.dataset_builder.store.importers import read_rows
from vramcast.errors import UserError
from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.sizes import MIB

_COLUMN = "faketensor_peak_mib"


class FakeTensor(Formula):
    """Inputs, activations, gradients and temporaries; neither weights nor optimizer, cache or context.

    Where a table of measurements has its own column of FakeTensor figures, `published` holds them by example, and they
    count. Everywhere else the figure comes from the simulation: the bytes requested at its peak without the weights and
    the optimizer's state, which the published passes did not see. It is a bound from above: a workspace that is held at
    the peak is in it, and taking that out would not give the tensors' own peak, which lies at another moment. Only of a
    job that does not fit it is too little: a real pass knows no card, the simulation ends where it is full.
    """

    name = "fake_tensor"

    def __init__(self, published: Mapping[str, int] | None = None) -> None:
        self.published = published or {}

    def used_bytes(self, example: Example) -> float:
        """The published figure, else the simulated one."""
        if example.id in self.published:
            return self.published[example.id]
        return fake_tensor_bytes(example)


def fake_tensor_bytes(example: Example) -> int:
    """What a FakeTensor pass would count, from the simulated peak."""
    simulated, static = example.simulation, example.static
    # a run that the card was too small for mostly ends in its first step, before there is any state
    state_bytes = static.optimizer_bytes if simulated.status is Status.OK else 0
    seen_bytes = (simulated.requested_bytes or 0) - static.parameter_bytes - state_bytes
    return max(seen_bytes, static.gradient_bytes)  # at the end of a backward pass all gradients are there


def read_published(path: Path) -> dict[str, int]:
    """The FakeTensor figures of a table that has them, in bytes by the row's id; none for a table without."""
    with path.open(newline="") as lines:
        records = list(csv.DictReader(lines))
    if not records or _COLUMN not in records[0]:
        return {}
    try:
        cells = [float(record[_COLUMN]) if record[_COLUMN] else None for record in records]
    except ValueError as error:
        raise UserError(
            f"expected figures in the column {_COLUMN} of {path}, found: {error}; mend the table"
        ) from error
    rows = zip(read_rows(path), cells, strict=True)
    return {row.spec.id: int(cell * MIB) for row, cell in rows if cell is not None}
