"""Examples from the data of a configuration: published tables, and rows of builds on the virtual GPU or a real one."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from vramcast.dataset_builder.backends.cuda.backend import CudaBackend
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.dataset_builder.configuration import compose_build, make_build, settings_of
from vramcast.dataset_builder.executors import Executor
from vramcast.dataset_builder.pipeline import run_with_bar
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.importers import read_rows
from vramcast.device.profiles import device_names, device_of_gpu, load_profile
from vramcast.errors import UserError
from vramcast.models.buckets import Buckets
from vramcast.models.example import Example
from vramcast.models.examples import example_of_row, examples_of_rows, simulation_of_row
from vramcast.train.retraining import named_specs, retrained, simulated
from vramcast.train.settings import DataSettings
from vramcast.train.table_examples import built_with_tables, measured_with_tables
from vramcast.virtual_gpu.measurement import Status

VIRTUAL, CUDA = VirtualBackend.name, CudaBackend.name
"""Backends whose rows can be labels."""


def load_examples(data: DataSettings, executor: Executor, workers: int) -> list[Example]:
    """Return the examples of a run, in an order that depends on the examples only."""
    if data.tables:
        built = (example for path in data.builds for example in built_with_tables(path))
        examples = [*measured_with_tables(measured_rows(data), data.cache), *built]
    else:
        examples = [*_measured(data, workers), *_of_builds(data, executor, workers)]
    if not examples:
        raise UserError(
            f"expected rows of the families {data.families} in data={data.name}, found none: choose other families"
        )
    return sorted(examples, key=lambda example: (example.source, example.id))


def buckets_of(examples: Sequence[Example], width_bytes: int) -> Buckets:
    """Return buckets up to the capacity of the largest device that the examples were measured on."""
    return Buckets(width_bytes, max(example.capacity_bytes for example in examples))


def measured_rows(data: DataSettings) -> list[Row]:
    """Return the rows of the tables, each job once."""
    if data.path is None:
        return []
    return list(_first_of_each([row for path in _tables(data) for row in _table_rows(data, path)]))


def _table_rows(data: DataSettings, path: Path) -> list[Row]:
    """Return the wanted rows of a table, or as many as `data.most` allows."""
    rows = [row for row in read_rows(path) if _wanted(data, row)]
    most = next((count for pattern, count in data.most.items() if fnmatch(path.name, pattern)), None)
    if most is None:
        return rows
    usable = [row for row in rows if row.measurement.status in (Status.OK, Status.OOM)]
    groups = sorted({row.spec.group for row in usable})
    Random(data.seed).shuffle(groups)  # noqa: S311 - no secret depends on it
    rank = {group: index for index, group in enumerate(groups)}
    return sorted(usable, key=lambda row: rank[row.spec.group])[:most]


def _measured(data: DataSettings, workers: int) -> list[Example]:
    rows = measured_rows(data)
    profiles = {device: load_profile(device) for device in {str(row.provenance.device) for row in rows}}
    store = SimulationStore(data.cache, workers)
    measured = examples_of_rows(rows, profiles, store)
    if not data.optimizers:
        return measured
    others = retrained([*(row.spec for row in rows), *named_specs(data.networks)], data.optimizers)
    return [*measured, *simulated(others, load_profile(str(data.device)), store)]


def _tables(data: DataSettings) -> list[Path]:
    directory = Path(str(data.path))
    if not directory.is_dir():
        raise UserError(
            f"expected a directory with tables of measurements at {directory}, found none: use data.path=DIR"
        )
    paths = sorted({path for pattern in data.files for path in directory.rglob(pattern)})
    if not paths:
        raise UserError(f"expected tables such as {list(data.files)} in {directory}, found none: use data.path=DIR")
    return paths


def _first_of_each(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the first row of each job, so that none counts twice."""
    seen: set[tuple[str, str | None]] = set()
    for row in rows:
        key = (row.spec.id, row.provenance.device)
        if key not in seen:
            seen.add(key)
            yield row


def _wanted(data: DataSettings, row: Row) -> bool:
    families = data.wanted_families()
    return families is None or row.spec.family in families


def _of_builds(data: DataSettings, executor: Executor, workers: int) -> list[Example]:
    """Return examples of builds; rows of a real GPU are simulated on its device profile."""
    if data.rows is None:
        return []
    rows = _existing_rows(data) if data.builds else _built_rows(data, executor)
    rows = list(_first_of_each(_on_profiles([row for row in rows if _wanted(data, row)])))
    profiles = {device: load_profile(device) for device in {str(row.provenance.device) for row in rows}}
    virtual = [
        example_of_row(row, profiles[str(row.provenance.device)], simulation_of_row(row))
        for row in rows
        if row.provenance.backend == VIRTUAL and row.measurement.status in (Status.OK, Status.OOM)
    ]
    measured = [row for row in rows if row.provenance.backend == CUDA]
    return [*virtual, *examples_of_rows(measured, profiles, SimulationStore(data.cache, workers))]


def _existing_rows(data: DataSettings) -> list[Row]:
    """Return the rows of existing builds, without those measured beside other processes."""
    rows = []
    for path in data.builds:
        stored = read_journal(Path(path)).rows
        kinds = {row.provenance.backend for row in stored}
        if not stored or not kinds <= {VIRTUAL, CUDA}:
            raise UserError(
                f"expected rows of backend=virtual or backend=cuda in {path}, found {sorted(map(str, kinds))}: "
                "name other data.builds"
            )
        rows += stored
    alone = [row for row in rows if row.measurement.alone is not False]
    if len(alone) < len(rows):
        print(f"note: {len(rows) - len(alone)} rows are left out: other processes used the GPU", file=sys.stderr)
    return alone


def _device_of(gpu_name: str | None) -> str:
    device = device_of_gpu(gpu_name or "")
    if device is None:
        raise UserError(
            f"expected a device profile for the GPU {gpu_name}, found {device_names()}: "
            "add one whose title names the GPU"
        )
    return device


def _on_profiles(rows: Sequence[Row]) -> list[Row]:
    """Replace the names of GPUs in rows by those of their device profiles."""
    gpus = {row.provenance.device for row in rows if row.provenance.backend == CUDA}
    device_of = {gpu: _device_of(gpu) for gpu in gpus}
    names = [device_of.get(row.provenance.device, row.provenance.device) for row in rows]
    return [
        replace(row, provenance=replace(row.provenance, device=name)) for row, name in zip(rows, names, strict=True)
    ]


def _built_rows(data: DataSettings, executor: Executor) -> list[Row]:
    families = data.wanted_families()
    return [
        row
        for family, count in data.counts.items()
        if count and (families is None or family in families)
        for row in _built(data, str(data.device), family, count, executor)
    ]


def _built(data: DataSettings, device: str, family: str, count: int, executor: Executor) -> list[Row]:
    """Run or resume a build and return its rows."""
    words = [f"family={family}", f"n={count}", f"seed={data.seed}", f"device={device}", "backend=virtual"]
    out = Path(str(data.rows)) / device / f"{family}-{count}-seed{data.seed}"
    build = make_build(settings_of(compose_build(words), words), out)
    run_with_bar(build, executor, f"building {family}")
    return read_journal(out).rows
