"""Public measurements as rows."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vramcast.dataset_builder.analysis.static import static_estimate
from vramcast.dataset_builder.schema import Provenance, Row
from vramcast.dataset_builder.store.importers import gpumemnet, real_networks, timm
from vramcast.dataset_builder.store.importers.gpumemnet import table_of
from vramcast.dataset_builder.store.importers.layout import Label, Layout, Record
from vramcast.dataset_builder.store.journal import JournalWriter
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import Status

BACKEND = "nvidia-smi"
"""What all public tables were measured with."""
_LAYOUTS = (*gpumemnet.LAYOUTS, timm.LAYOUT, real_networks.LAYOUT)


def import_file(path: Path, out: Path, profile: str | None = None) -> str:
    """Write the rows of a public table into a journal; says in a line what came of it."""
    layout, records = _open(path)
    counts = dict.fromkeys(Status, 0)
    settings = {"import": path.name, "layout": layout.name, "citation": layout.citation}
    with JournalWriter(out, settings) as journal:
        known = len(journal.row_ids)
        for row in _rows(layout, _labels(layout, profile), records, path):
            counts[row.measurement.status] += 1
            if row.spec.id not in journal.row_ids:
                journal.append(row)
        new = len(journal.row_ids) - known
    found = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return f"{sum(counts.values())} lines of {path.name} ({layout.name}): {found}; {new} rows added to {out}"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a public table; a job that was measured on several stacks comes once for each."""
    layout, records = _open(path)
    return _rows(layout, layout.labels, records, path)


def _labels(layout: Layout, profile: str | None) -> tuple[Label, ...]:
    """A journal has one row a job, so of several measurements one stack's are taken: the first, unless one is named."""
    chosen = profile or layout.labels[0].profile
    found = [label for label in layout.labels if label.profile == chosen]
    if not found:
        known = sorted({label.profile for label in layout.labels})
        raise UserError(f"expected --device to be one of {known} for this table, found {profile!r}: change it")
    return tuple(found[:1])


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
    known = "; ".join(f"{layout.name}: {sorted(layout.columns)}" for layout in _LAYOUTS)
    raise UserError(
        f"expected the columns of a public table ({known}), found {sorted(columns)} in {path}: check the file"
    )


def _rows(layout: Layout, labels: tuple[Label, ...], records: list[Record], path: Path) -> Iterator[Row]:
    notes: Mapping[int, str] | None = None
    for place, record in enumerate(records):
        try:
            spec = layout.spec(record)
            if spec is None:
                continue
            found = [(label, label.measurement(record, spec)) for label in labels]
            notes = layout.notes(records) if notes is None else notes
        except (ValueError, LookupError, TypeError, SyntaxError, AttributeError) as error:
            raise UserError(
                f"expected a {layout.name} line at {path}:{place + 2}, found: {error}; mend or remove it"
            ) from error
        table = table_of(spec)
        static = static_estimate(spec.training, table) if table else None
        for label, measurement in found:
            if measurement is not None:
                noted = replace(measurement, notes=(notes[place],)) if place in notes else measurement
                yield Row(spec, static, noted, _provenance(label, layout, path))


def _provenance(label: Label, layout: Layout, path: Path) -> Provenance:
    return Provenance(
        origin="measured",
        backend=BACKEND,
        device=label.profile,
        versions={},
        seed=None,
        time=label.year,
        source=f"{path.name}; {layout.citation}",
    )
