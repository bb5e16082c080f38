"""Move unreadable lines out of a journal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vramcast.dataset_builder.rows import SCHEMA_VERSION
from vramcast.dataset_builder.store.lines import HEADER, Line, check_schema, encode_line, read_lines
from vramcast.dataset_builder.store.reader import locate, to_record
from vramcast.errors import UserError
from vramcast.files.durable import locked, replacing, sync

BAD_NAME = "journal.bad"


@dataclass(frozen=True)
class RepairReport:
    """The result of a repair."""

    valid: int
    """Number of valid rows and rejections."""
    moved: Mapping[int, str]
    """Faults of the lines that were moved to `bad_path`, by line number."""
    bad_path: Path
    header_lost: bool
    """True if the settings of the build are lost: its rows can be read, but it cannot be resumed."""

    def __str__(self) -> str:
        faults = "; ".join(f"line {number} {fault}" for number, fault in self.moved.items())
        moved = f"{len(self.moved)} moved to {self.bad_path} ({faults})" if self.moved else "none had to be moved"
        lost = "; the settings of the build are lost, so it cannot be resumed" if self.header_lost else ""
        return f"{self.valid} rows and rejections are valid, {moved}{lost}"


def repair(directory: Path | str) -> RepairReport:
    """Move unreadable lines to `journal.bad` and keep all others."""
    journal = locate(directory)
    bad_path = journal.with_name(BAD_NAME)
    with locked(journal.parent):
        valid, moved, raws = 0, {}, []
        for line in read_lines(journal):
            if fault := _fault(journal, line):
                moved[line.number] = fault
                raws.append(line.raw)
            elif line.number > 1:
                valid += 1
        if valid == 0 and 1 in moved:
            raise UserError(f"expected a journal at {journal}, found no valid line: move the file away")
        if moved:
            _append_raw(bad_path, raws)
            _rewrite(journal, moved)
    return RepairReport(valid, moved, bad_path, 1 in moved)


def _fault(journal: Path, line: Line) -> str | None:
    """Return the fault of a line, including a mismatch with the schema."""
    if line.fault or line.record is None:
        return line.fault
    if line.number == 1:
        check_schema(journal, line.record)
        return None
    try:
        to_record(journal, line.number, line.record)
    except UserError as error:
        return f"does not match the schema ({error.__cause__})"
    return None


def _append_raw(path: Path, raws: list[bytes]) -> None:
    try:
        with path.open("ab") as file:
            file.writelines(raw if raw.endswith(b"\n") else raw + b"\n" for raw in raws)
        sync(path)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"expected to write {path}, found: {error.strerror}; fix that and repair again") from error


def _rewrite(journal: Path, without: Mapping[int, str]) -> None:
    with replacing(journal) as temporary, temporary.open("wb") as file:
        if 1 in without:
            file.write(encode_line(HEADER, {"schema": SCHEMA_VERSION, "build": None}))
        file.writelines(line.raw for line in read_lines(journal) if line.number not in without)
