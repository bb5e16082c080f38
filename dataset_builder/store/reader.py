"""Read a journal. No lock is needed: a build may be writing it."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.rows import Rejection, Row
from vramcast.dataset_builder.store.lines import ROW, corrupt, valid_records
from vramcast.errors import UserError

JOURNAL_NAME = "journal.jsonl"


@dataclass(frozen=True)
class Header:
    """The first line of a journal."""

    schema: int
    build: Mapping[str, Any] | None
    """Settings of the build; None if a repair found them lost."""


@dataclass(frozen=True)
class Journal:
    """The contents of a journal at the time of reading."""

    path: Path
    header: Header
    rows: list[Row]
    rejections: list[Rejection]
    torn: str | None
    """Why the last line was left out; None if it was not."""


def locate(path: Path | str) -> Path:
    """Return the path of a journal from its own path or that of its build directory."""
    path = Path(path)
    journal = path / JOURNAL_NAME if path.is_dir() else path
    if journal.is_file():
        return journal
    what = f"only {_listing(path)}" if path.is_dir() else "no such file"
    raise UserError(
        f"expected a build directory with {JOURNAL_NAME} at {path}, found {what}: "
        "give the out=DIR of a build that has run"
    )


def _listing(directory: Path) -> str:
    names = sorted(item.name for item in directory.iterdir())
    return str(names) if len(names) <= 8 else f"{names[:8]} and {len(names) - 8} more"


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=2)


def read_header(path: Path | str) -> Header:
    """Read the first line only."""
    journal = locate(path)
    for _, record in valid_records(journal, _ignore):
        return Header(record["schema"], record.get("build"))
    raise UserError(f"expected a header in {journal}, found an empty journal: run the build again")


def _ignore(note: str) -> None:
    """Ignore an incomplete line; readers of the rows report it."""


def iter_records(path: Path | str, on_torn: Callable[[str], None] = _warn) -> Iterator[Row | Rejection]:
    """Yield rows and rejections in the order of writing; report an incomplete last line to `on_torn`."""
    journal = locate(path)
    return (
        to_record(journal, line.number, record) for line, record in valid_records(journal, on_torn) if line.number > 1
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which takes a third of the time of reading rows and frees none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_journal(path: Path | str) -> Journal:
    """Read a whole journal."""
    journal = locate(path)
    notes: list[str] = []
    header = read_header(journal)
    rows: list[Row] = []
    rejections: list[Rejection] = []
    with collector_paused():
        for record in iter_records(journal, notes.append):
            if isinstance(record, Row):
                rows.append(record)
            else:
                rejections.append(record)
    return Journal(journal, header, rows, rejections, notes[0] if notes else None)


def to_record(journal: Path, number: int, values: Mapping[str, Any]) -> Row | Rejection:
    """Return the row or rejection that a line holds."""
    kind = Row if values["type"] == ROW else Rejection
    try:
        return kind.from_json(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise corrupt(journal, number, f"does not match the schema ({error})") from error
