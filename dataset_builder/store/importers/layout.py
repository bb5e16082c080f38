"""What a public table is: its columns, what a line means, and the stacks that it was measured on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vramcast.dataset_builder.schema import Spec
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.sizes import MIB

Record = Mapping[str, str]


@dataclass(frozen=True)
class Label:
    """A column of measurements, and the stack that they were made on."""

    profile: str
    year: str
    measurement: Callable[[Record, Spec], Measurement | None]
    """None where a line has no figure."""


@dataclass(frozen=True)
class Layout:
    """One shape of public table."""

    name: str
    columns: frozenset[str]
    spec: Callable[[Record], Spec | None]
    """None for a line that is no job of one GPU."""
    labels: tuple[Label, ...]
    citation: str
    notes: Callable[[Sequence[Record]], Mapping[int, str]] = lambda _: {}
    """What a reader of the table's lines must know of some of them, by their places: it takes the others to see it."""


def measured(
    record: Record, status: Status, evidence: str | None = None, column: str = "Max GPU Memory (MiB)"
) -> Measurement:
    """The figure in a column, which was read off nvidia-smi."""
    return Measurement(status=status, device_used_bytes=int(float(record[column])) * MIB, evidence=evidence)
