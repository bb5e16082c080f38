"""Layouts of public tables: their columns, how to read a line, and the stacks that were measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vramcast.errors import check_amount
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement, Status

Record = Mapping[str, str]


@dataclass(frozen=True)
class MeasuredColumn:
    """A column of measurements and the stack that they were made on."""

    profile: str
    year: str
    measurement: Callable[[Record, Spec], Measurement | None]
    """Returns None if a line has no value."""


@dataclass(frozen=True)
class Layout:
    """The layout of one kind of public table."""

    name: str
    columns: frozenset[str]
    spec: Callable[[Record], Spec | None]
    """Returns None for a line that is not a job on one GPU."""
    measured: tuple[MeasuredColumn, ...]
    citation: str
    notes: Callable[[Sequence[Record]], Mapping[int, str]] = lambda _: {}
    """Returns notes on lines by their index. A note may depend on other lines."""


def measured(
    record: Record, status: Status, evidence: str | None = None, column: str = "Max GPU Memory (MiB)"
) -> Measurement:
    """Return a measurement with the value of a column, as nvidia-smi reported it."""
    used_mib = float(record[column])
    check_amount(column, used_mib)
    return Measurement(status=status, device_used_bytes=int(used_mib) * MIB, evidence=evidence)
