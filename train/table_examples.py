"""Examples with detailed layer tables and no simulation, in groups of one architecture."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.store.tables import read_tables, table_key
from vramcast.dataset_builder.table_store import TableStore
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.families.architecture_names import architecture_of
from vramcast.jobs.spec import Spec
from vramcast.models.example import Example
from vramcast.models.examples import example_of_row, examples_of_rows
from vramcast.progress import bar
from vramcast.virtual_gpu.measurement import Status

_profile = cache(load_profile)


def measured_with_tables(rows: Sequence[Row], cache_directory: str | None) -> list[Example]:
    """Return the examples of measured rows; their tables are made once and cached."""
    profiles = {device: _profile(device) for device in {str(row.provenance.device) for row in rows}}
    examples = examples_of_rows(rows, profiles, TableStore(cache_directory))
    specs = {row.spec.id: row.spec for row in rows}
    return [_grouped(example, specs[example.id]) for example in examples]


def built_with_tables(directory: str) -> Iterator[Example]:
    """Yield the examples of a build with tables, on all devices that its rows were replayed on.

    A job that does not fit counts for the device of its build alone. Its schedule is computed here, because the rows of
    one network follow one another and share its passes.
    """
    rows = [row for row in read_journal(Path(directory)).rows if row.measurement.status in (Status.OK, Status.OOM)]
    tables = dict(read_tables(directory))
    if not rows:
        raise UserError(f"expected rows with layer tables in {directory}, found none: name another directory")
    failed = 0
    for row in bar(rows, total=len(rows), unit="row", desc="schedules"):
        table = tables.get(table_key(row.spec))
        if table is None:
            failed += 1
            continue
        for one in _on_devices(row):
            example = example_of_row(one, _profile(str(one.provenance.device)), None, table)
            if example.scheduled.reserved_bytes:
                yield _grouped(example, row.spec)
    if failed:
        print(f"note: {failed} rows of {directory} have no layer table", file=sys.stderr)


def _on_devices(row: Row) -> Iterator[Row]:
    yield row
    for device, need in row.needs.items():
        if need.status is Status.OK and device != row.provenance.device:
            yield replace(row, measurement=need, provenance=replace(row.provenance, device=device))


def _grouped(example: Example, spec: Spec) -> Example:
    architecture = architecture_of(spec)
    return replace(example, group=architecture, design=architecture)
