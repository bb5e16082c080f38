"""From rows, modules and layer tables to examples: one path, so that what is learned is what is asked."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vramcast.dataset_builder.analysis.static import static_estimate
from vramcast.dataset_builder.jobs.job import table_of
from vramcast.dataset_builder.schema import LayerTable, Row
from vramcast.dataset_builder.simulation.findings import Findings
from vramcast.errors import UserError
from vramcast.models.example import Example, Target, is_convolution, simulated_of
from vramcast.virtual_gpu.measurement import TRIAL, Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.records import content_hash
from vramcast.virtual_gpu.training_setup import TrainingSetup

if TYPE_CHECKING:
    from vramcast.models.simulation import SimulationCache

ENDLESS_BYTES = 2**50
_UNNAMED = "unnamed"
"""The family of a network that nobody named: as good as any real one."""


def example_of_table(
    table: LayerTable,
    training: TrainingSetup,
    profile: DeviceProfile,
    simulation: Measurement | None = None,
    family: str | None = None,
) -> Example:
    """An example of what a layer table describes, on a device; with the virtual GPU's measurement if there is one."""
    overhead_bytes = profile.overhead_bytes(
        any(is_convolution(layer.kind) for layer in table.layers),
        any("batchnorm" in layer.kind.lower() for layer in table.layers),
    )
    group = content_hash({"layers": [vars(layer) for layer in table.layers], "input": table.input_elements})
    return Example(
        id=content_hash({"group": group, "training": vars(training)}),
        group=group,
        design=group,
        family=family or _UNNAMED,
        training=training,
        layers=table.layers,
        input_elements=table.input_elements,
        static=static_estimate(training, table),
        simulated=simulated_of(simulation) if simulation else None,
        overhead_bytes=simulation.breakdown["context"] if simulation else overhead_bytes,
        capacity_bytes=profile.available_bytes,
        source=profile.name,
    )


def example_of_findings(findings: Findings, profile: DeviceProfile, endless: bool = False) -> Example:
    """An example of an inspected network on a device that it was inspected on; or on that device without an end."""
    found = (findings.endless if endless else findings.measurements)[profile.name]
    example = example_of_table(findings.table, findings.training, profile, found, findings.family)
    return replace(example, capacity_bytes=ENDLESS_BYTES) if endless else example


def example_of_row(
    row: Row, profile: DeviceProfile, simulation: Measurement | None, table: LayerTable | None = None
) -> Example:
    """An example with the target that a row measured; the layer table is that of its network, where it is known."""
    known = table or table_of(row.spec)
    example = example_of_table(known, row.spec.training, profile, simulation, row.spec.family)
    return replace(
        example,
        id=row.spec.id,
        group=row.spec.group,
        design=row.spec.design,
        target=_target(row),
        backend=row.provenance.backend,
    )


def examples_of_rows(
    rows: Iterable[Row], profiles: Mapping[str, DeviceProfile], cache: "SimulationCache | None"
) -> list[Example]:
    """Examples of the rows that say what a job takes: completed ones, and those that ran out of memory.

    `profiles` has one for each device that rows were measured on. Without a cache nothing is simulated.
    """
    usable = [row for row in rows if row.measurement.status in (Status.OK, Status.OOM)]
    examples: list[Example] = []
    for device in dict.fromkeys(row.provenance.device for row in usable):
        if device is None or device not in profiles:
            raise UserError(f"expected a device profile for {device!r}, found {sorted(profiles)}: add it")
        chosen = [row for row in usable if row.provenance.device == device]
        examples += _of_one_device(chosen, profiles[device], cache)
    return examples


def _of_one_device(rows: Sequence[Row], profile: DeviceProfile, cache: "SimulationCache | None") -> list[Example]:
    if cache is None:
        return [example_of_row(row, profile, None) for row in rows]
    found = cache.measure([row.spec for row in rows], profile)
    if len(found) < len(rows):
        print(f"note: {len(rows) - len(found)} rows repeat a spec or were not simulated", file=sys.stderr)
    simulated = [row for row in rows if row.spec.id in found]
    tables = cache.tables([row.spec for row in simulated])
    return [example_of_row(row, profile, found[row.spec.id], tables[row.spec.id]) for row in simulated]


def _target(row: Row) -> Target:
    used_bytes = row.measurement.peak_bytes
    if used_bytes is None:
        raise UserError(f"expected a measured peak in the row {row.spec.id}, found none: leave it out")
    return Target(used_bytes, fits=row.measurement.status is Status.OK, trial=TRIAL in row.measurement.notes)
