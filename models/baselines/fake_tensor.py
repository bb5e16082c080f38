"""A FakeTensor pass: the peak of what forward and backward create, counted by a dispatch mode."""

import csv
from collections.abc import Mapping
from pathlib import Path

from vramcast.dataset_builder.store.importers import read_rows
from vramcast.errors import UserError, check_amount
from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Status

_COLUMN = "faketensor_peak_mib"


class FakeTensor(Formula):
    """Inputs, activations, gradients and temporaries, without weights, optimizer, cache and context.

    `published` holds the FakeTensor figures of a table that has them. Otherwise the figure comes from the simulation:
    the bytes requested at its peak without the weights and the optimizer state, which the published passes did not
    count. It is an upper bound, because it includes a workspace at the peak. For a job that does not fit it is too
    low, because the simulation ends when the device is full.
    """

    name = "fake_tensor"

    def __init__(self, published: Mapping[str, int] | None = None) -> None:
        self.published = published or {}

    @property
    def needs_simulation(self) -> bool:
        """True if examples need a simulated measurement."""
        return True

    def used_bytes(self, example: Example) -> float:
        """Return the published figure, else the simulated one."""
        if example.id in self.published:
            return self.published[example.id]
        return fake_tensor_bytes(example)


def fake_tensor_bytes(example: Example) -> int:
    """Return the figure of a FakeTensor pass, derived from the simulated peak."""
    simulated, static = example.simulation, example.static
    # a run that does not fit mostly ends in its first step, before there is any state
    state_bytes = static.optimizer_bytes if simulated.status is Status.OK else 0
    seen_bytes = (simulated.requested_bytes or 0) - static.parameter_bytes - state_bytes
    return max(seen_bytes, static.gradient_bytes)  # all gradients exist at the end of a backward pass


def read_published(path: Path) -> dict[str, int]:
    """Return the FakeTensor figures of a table in bytes by spec id, or none if it has no such column."""
    with path.open(newline="") as lines:
        records = list(csv.DictReader(lines))
    if not records or _COLUMN not in records[0]:
        return {}
    try:
        cells = [float(record[_COLUMN]) if record[_COLUMN] else None for record in records]
        for cell in cells:
            check_amount(_COLUMN, cell or 0.0)
    except ValueError as error:
        raise UserError(f"expected figures in the column {_COLUMN} of {path}, found: {error}; fix the table") from error
    rows = zip(read_rows(path), cells, strict=True)
    return {row.spec.id: int(cell * MIB) for row, cell in rows if cell is not None}
