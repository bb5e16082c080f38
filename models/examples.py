"""From rows, modules and layer tables to examples: one path, so that what is learned is what is asked."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from dataset_builder.analysis.layers import layer_table
from dataset_builder.analysis.static import static_estimate
from dataset_builder.errors import UserError
from dataset_builder.families import FAMILIES
from dataset_builder.families.external import build_external
from dataset_builder.filters import Rejected, check
from dataset_builder.measure.virtual.allocator import AllocatorOptions
from dataset_builder.measure.virtual.backend import simulate
from dataset_builder.measure.virtual.profile import DeviceProfile
from dataset_builder.measure.virtual.session import trace_training
from dataset_builder.schema import (
    MIB,
    LayerTable,
    Measurement,
    Row,
    Spec,
    Status,
    TrainingSetup,
    canonical_json,
    content_hash,
)
from dataset_builder.training import random_inputs
from models.example import Example, Target
from models.simulation import SimulationCache, simulated_of

_TABLE_BATCH = 2
"""Any batch shows a module's layers; a norm in training mode wants more than one sample."""
_ATTENTION = ("MultiheadAttention", "scaled_dot_product_attention")


def example_of_table(
    table: LayerTable,
    training: TrainingSetup,
    profile: DeviceProfile,
    simulation: Measurement | None = None,
    family: str | None = None,
) -> Example:
    """An example of what a layer table describes, on a device; with the virtual GPU's measurement if there is one."""
    family = family or family_of(table)
    overhead_bytes = profile.overhead_bytes(_has(table, "conv"), _has(table, "batchnorm"))
    group = content_hash({"layers": [vars(layer) for layer in table.layers], "input": table.input_elements})
    return Example(
        id=content_hash({"group": group, "training": vars(training)}),
        group=group,
        family=family,
        training=training,
        layers=table.layers,
        input_elements=table.input_elements,
        static=static_estimate(training, table),
        simulated=simulated_of(simulation) if simulation else None,
        overhead_bytes=simulation.breakdown["context"] if simulation else overhead_bytes,
        capacity_bytes=(profile.total_mib - profile.driver_mib) * MIB,
        source=profile.name,
    )


def example_of_module(
    module: nn.Module,
    make_inputs: Callable[[int], tuple[Any, ...]],
    training: TrainingSetup,
    profile: DeviceProfile,
    family: str | None = None,
) -> Example:
    """An example of a module on the meta device, in training mode, that takes the batches of `make_inputs`."""
    table = layer_table(module, make_inputs(_TABLE_BATCH))
    trace = trace_training(module, make_inputs, training, compute_capability=profile.compute_capability)
    return example_of_table(table, training, profile, simulate(trace, profile, AllocatorOptions()), family)


def example_of_row(row: Row, profile: DeviceProfile, simulation: Measurement | None) -> Example:
    """An example with the target that a row measured."""
    example = example_of_table(table_of(row.spec), row.spec.training, profile, simulation, row.spec.family)
    return replace(example, id=row.spec.id, group=row.spec.group, target=_target(row))


def examples_of_rows(
    rows: Iterable[Row], profiles: Mapping[str, DeviceProfile], cache: SimulationCache | None
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


def _of_one_device(rows: Sequence[Row], profile: DeviceProfile, cache: SimulationCache | None) -> list[Example]:
    if cache is None:
        return [example_of_row(row, profile, None) for row in rows]
    found = cache.measure([row.spec for row in rows], profile)
    if len(found) < len(rows):
        print(f"note: {len(rows) - len(found)} rows repeat a spec or were not simulated", file=sys.stderr)
    return [example_of_row(row, profile, found[row.spec.id]) for row in rows if row.spec.id in found]


def table_of(spec: Spec) -> LayerTable:
    """The layers of a spec's network: by the filter where there is a plan, else by looking at the module."""
    if spec.family in FAMILIES:
        found = check(spec)
        if isinstance(found, Rejected):
            raise UserError(f"expected a network that can be trained, found that {found.reason}: change it")
        return found
    return _external_table(spec.family, canonical_json(dict(spec.network)))


@lru_cache(maxsize=2000)
def _external_table(family: str, network: str) -> LayerTable:
    """A network of a library is looked at once, whatever it is trained with."""
    module, inputs = build_external(family, json.loads(network))
    shapes = [(item.shape, item.vocabulary) for item in inputs]
    return layer_table(module, random_inputs(shapes, _TABLE_BATCH, "fp32", "meta"))


def family_of(table: LayerTable) -> str:
    """The kind of network that a table shows, for one that nobody named."""
    kinds = {layer.kind for layer in table.layers}
    if kinds.intersection(_ATTENTION):
        return "transformer"
    return "cnn" if _has(table, "conv") else "mlp"


def _has(table: LayerTable, kind: str) -> bool:
    return any(layer.kind.lower().startswith(kind) for layer in table.layers)


def _target(row: Row) -> Target:
    used_bytes = row.measurement.peak_bytes
    if used_bytes is None:
        raise UserError(f"expected a measured peak in the row {row.spec.id}, found none: leave it out")
    return Target(used_bytes, fits=row.measurement.status is Status.OK)
