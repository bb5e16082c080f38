"""Examples from simulations, layer tables and measured rows, along one path for training and for answers."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from vramcast.errors import UserError
from vramcast.jobs.analysis.schedule import Schedule
from vramcast.jobs.analysis.static import static_estimate
from vramcast.jobs.families.script_jobs import LENGTHS_VARY
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import LayerRecord, LayerTable, StaticEstimate
from vramcast.models.example import UNBOUNDED_BYTES, Example, Label
from vramcast.models.layer_columns import LayerColumns
from vramcast.simulation.result import Peaks, Simulation
from vramcast.virtual_gpu.compiled.notes import is_compiler_note
from vramcast.virtual_gpu.measurement import TRIAL, VARYING, Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.tracing.trace import GUESSED_TRUTH
from vramcast.virtual_gpu.training.setup import TrainingSetup

if TYPE_CHECKING:  # answers need nothing of the builder
    from vramcast.dataset_builder.rows import Row
    from vramcast.dataset_builder.simulation_store import SimulationStore
    from vramcast.dataset_builder.table_store import TableStore

_HARMLESS_NOTES = (GUESSED_TRUTH, LENGTHS_VARY)
"""Assumptions that decide little: xMem's rows with the first are as close to their simulation as others, and lengths
that vary up to a known one decide the fragmentation alone."""
_UNNAMED = "unnamed"
"""The family of a network without a name, treated like that of any real network."""


@dataclass(frozen=True)
class NetworkFacts:
    """The features of a layer table and its training that are equal on all devices."""

    layers: LayerColumns
    static: StaticEstimate

    @classmethod
    def of(cls, table: LayerTable, training: TrainingSetup) -> Self:
        """Make columns of the table, and estimate its memory from shapes."""
        return cls(LayerColumns.of(table.layers), static_estimate(training, table))


def example_of_table(
    table: LayerTable,
    training: TrainingSetup,
    profile: DeviceProfile,
    simulated: Measurement | None = None,
    family: str | None = None,
    facts: NetworkFacts | None = None,
) -> Example:
    """Return the example of a layer table on a device, with its simulated measurement if there is one."""
    facts = facts or NetworkFacts.of(table, training)
    notes = set(simulated.notes) if simulated else set()
    of_ranks = set(profile.rank_notes(world_size=2))
    of_compiler = set(filter(is_compiler_note, notes))
    return Example(
        id=facts.layers.content,
        group=facts.layers.content,
        design=facts.layers.content,
        family=family or _UNNAMED,
        training=training,
        layers=facts.layers,
        input_elements=table.input_elements,
        static=facts.static,
        simulated=simulated,
        overhead_bytes=(
            simulated.breakdown["context"]
            if simulated
            else profile.overhead_bytes(bool(facts.layers.convolution_count), facts.layers.batch_norms)
        ),
        capacity_bytes=profile.available_bytes,
        source=profile.name,
        calibrated=profile.calibrated_on is not None,
        assumed=bool(notes - {*profile.notes, *of_ranks, *of_compiler, *_HARMLESS_NOTES}),
        compiled=bool(of_compiler),
        unknown_nccl=bool(notes & of_ranks),
        schedule=Schedule(table, training, profile),
    )


def example_of_simulation(
    simulation: Simulation, profile: DeviceProfile, unbounded: bool = False, facts: NetworkFacts | None = None
) -> Example:
    """Return the example of a simulated job on a device, or on that device without a memory limit."""
    peaks = simulation.peaks[profile.name]
    measurement = (peaks.unbounded or peaks.bounded) if unbounded else peaks.bounded
    example = example_of_table(simulation.table, simulation.training, profile, measurement, simulation.family, facts)
    capacity_bytes = UNBOUNDED_BYTES if unbounded else example.capacity_bytes
    return replace(example, orders=peaks.orders, capacity_bytes=capacity_bytes)


def example_of_row(
    row: "Row", profile: DeviceProfile, simulation: Simulation | None, table: LayerTable | None = None
) -> Example:
    """Return the example of a measured row; without a simulation, of a layer table alone: the given or a plain one."""
    example = (
        example_of_simulation(simulation, profile)
        if simulation
        else example_of_table(table or table_of(row.spec), row.spec.training, profile, None, row.spec.family)
    )
    label = _label(row)
    return replace(
        example,
        assumed=example.assumed or label.varying,
        id=row.spec.id,
        group=row.spec.group,
        design=row.spec.design,
        label=label,
        backend=row.provenance.backend,
        time=row.provenance.time,
    )


def simulation_of_row(row: "Row") -> Simulation:
    """Return the simulation that a row of the virtual backend holds."""
    peaks = {str(row.provenance.device): Peaks(row.measurement)}
    return Simulation(table_of(row.spec), row.spec.training, peaks, family=row.spec.family)


def examples_of_rows(
    rows: "Iterable[Row]", profiles: Mapping[str, DeviceProfile], store: "SimulationStore | TableStore | None"
) -> list[Example]:
    """Return examples of the rows that completed or ran out of memory.

    `profiles` has one for each device that rows were measured on. With a store of tables, and without a store, nothing
    is simulated.
    """
    usable = [row for row in rows if row.measurement.status in (Status.OK, Status.OOM)]
    examples: list[Example] = []
    for device in dict.fromkeys(row.provenance.device for row in usable):
        if device is None or device not in profiles:
            raise UserError(f"expected a device profile for {device!r}, found {sorted(profiles)}: add it")
        chosen = [row for row in usable if row.provenance.device == device]
        examples += _examples_on_device(chosen, profiles[device], store)
    return examples


def _examples_on_device(
    rows: "Sequence[Row]", profile: DeviceProfile, store: "SimulationStore | TableStore | None"
) -> list[Example]:
    if store is None:
        return [example_of_row(row, profile, None) for row in rows]
    from vramcast.dataset_builder.table_store import TableStore  # noqa: PLC0415 - answers need nothing of the builder

    if isinstance(store, TableStore):
        tables = store.tables(row.spec for row in rows)
        return [example_of_row(row, profile, None, tables[row.spec.group]) for row in rows if row.spec.group in tables]
    simulations = store.simulate([row.spec for row in rows], profile)
    if len(simulations) < len(rows):
        print(f"note: {len(rows) - len(simulations)} rows repeat a spec or were not simulated", file=sys.stderr)
    return [example_of_row(row, profile, simulations[row.spec.id]) for row in rows if row.spec.id in simulations]


def without_details(example: Example) -> Example:
    """Return an example with the layer table that a tool without details gives, as torchinfo does."""
    if example.schedule is None:
        return example
    table = example.schedule.table
    plain = replace(table, layers=tuple(LayerRecord(**layer.basis) for layer in table.layers))
    facts = NetworkFacts.of(plain, example.training)
    schedule = Schedule(plain, example.training, example.schedule.profile)
    return replace(example, layers=facts.layers, static=facts.static, schedule=schedule)


def _label(row: "Row") -> Label:
    used_bytes = row.measurement.peak_bytes
    if used_bytes is None:
        raise UserError(f"expected a measured peak in the row {row.spec.id}, found none: leave it out")
    return Label(
        used_bytes,
        fits=row.measurement.status is Status.OK,
        trial=TRIAL in row.measurement.notes,
        least_used_bytes=row.measurement.least_used_bytes,
        varying=VARYING in row.measurement.notes,
        parts=row.measurement.breakdown if row.provenance.origin == "simulated" else None,
    )
