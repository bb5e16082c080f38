"""Import public tables of measurements as rows."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.dataset_builder.store.importers import gpumemnet, real_networks, timm, xmem
from vramcast.dataset_builder.store.importers.gpumemnet import table_of
from vramcast.dataset_builder.store.importers.layout import Layout, MeasuredColumn, Record
from vramcast.dataset_builder.store.journal import JournalWriter
from vramcast.error_words import message_of
from vramcast.errors import UserError, check_choice
from vramcast.jobs.analysis.static import static_estimate
from vramcast.virtual_gpu.measurement import Status

BACKEND = "nvidia-smi"
"""The tool with which all public tables were measured."""
_LAYOUTS = (*gpumemnet.LAYOUTS, timm.LAYOUT, real_networks.LAYOUT, xmem.LAYOUT)


def import_file(path: Path, out: Path, profile: str | None = None) -> str:
    """Write the rows of a public table to a journal and return a summary of one line."""
    layout, records = _open(path)
    counts = dict.fromkeys(Status, 0)
    settings = {"import": path.name, "layout": layout.name, "citation": layout.citation}
    with JournalWriter(out, settings) as journal:
        before = len(journal.row_ids)
        for row in _rows(layout, _columns(layout, profile), records, path):
            counts[row.measurement.status] += 1
            if row.spec.id not in journal.row_ids:
                journal.append(row)
        new = len(journal.row_ids) - before
    statuses = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return f"{sum(counts.values())} lines of {path.name} ({layout.name}): {statuses}; {new} rows added to {out}"


def read_rows(path: Path) -> Iterator[Row]:
    """Return the rows of a public table; a job that was measured on several stacks has a row for each."""
    layout, records = _open(path)
    return _rows(layout, layout.measured, records, path)


def _columns(layout: Layout, profile: str | None) -> tuple[MeasuredColumn, ...]:
    """Return the column to import: a journal has one row per job, so one stack is chosen, by default the first."""
    chosen = profile or layout.measured[0].profile
    check_choice("--device", chosen, sorted({column.profile for column in layout.measured}))
    return tuple(column for column in layout.measured if column.profile == chosen)[:1]


def _open(path: Path) -> tuple[Layout, list[Record]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            records: list[Record] = list(reader)
            columns = set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"expected a CSV table at {path}, found: {error}; name another file") from error
    for layout in _LAYOUTS:
        if layout.columns <= columns:
            return layout, records
    layouts = "; ".join(f"{layout.name}: {sorted(layout.columns)}" for layout in _LAYOUTS)
    raise UserError(
        f"expected the columns of a public table ({layouts}), found {sorted(columns)} in {path}: check the file"
    )


def _rows(layout: Layout, columns: tuple[MeasuredColumn, ...], records: list[Record], path: Path) -> Iterator[Row]:
    notes: Mapping[int, str] | None = None
    for place, record in enumerate(records):
        try:
            spec = layout.spec(record)
            if spec is None:
                continue
            measurements = [(column, column.measurement(record, spec)) for column in columns]
            notes = layout.notes(records) if notes is None else notes
        except (ValueError, LookupError, TypeError, SyntaxError, AttributeError, OverflowError) as error:
            raise UserError(
                f"expected a {layout.name} line at {path}:{place + 2}, found: {message_of(error)}; fix or remove it"
            ) from error
        table = table_of(spec)
        static = static_estimate(spec.training, table) if table else None
        for column, measurement in measurements:
            if measurement is not None:
                noted = replace(measurement, notes=(notes[place],)) if place in notes else measurement
                yield Row(spec, static, noted, _provenance(column, layout, path))


def _provenance(column: MeasuredColumn, layout: Layout, path: Path) -> Provenance:
    return Provenance(
        origin="measured",
        backend=BACKEND,
        device=column.profile,
        versions={},
        seed=None,
        time=column.year,
        source=f"{path.name}; {layout.citation}",
    )
