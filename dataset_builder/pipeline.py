"""A build: space -> sampler -> spec -> filter -> backend -> row -> journal. Only this module uses all stages."""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.backends import Backend, BackendResult
from vramcast.dataset_builder.executors import Executor
from vramcast.dataset_builder.rows import Provenance, Rejection, Row
from vramcast.dataset_builder.samplers import Sampler
from vramcast.dataset_builder.samplers.coverage import Coverage, coverage, coverage_report
from vramcast.dataset_builder.space import Assignment, Space
from vramcast.dataset_builder.store import JournalWriter
from vramcast.dataset_builder.store.tables import TableWriter
from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.jobs.analysis.static import static_estimate
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.filters import Rejected, check
from vramcast.jobs.spec import Spec, StaticEstimate
from vramcast.progress import bar

COVERAGE_NAME = "coverage.md"
_MAX_USELESS = 5_000
"""Consecutive candidates that are repeated or rejected before the space counts as exhausted."""


@dataclass(frozen=True)
class Build:
    """The settings that determine the rows of a build, and the directory that they are written to."""

    space: Space
    sampler: Sampler
    backend: Backend
    n: int
    seed: int
    out: Path
    settings: Mapping[str, Any]
    """The same settings as plain values, for the header of the journal."""


@dataclass
class BuildResult:
    """The counts of a build after one run of it."""

    rows: int = 0
    resumed: int = 0
    rejected: int = 0
    notes: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=lambda: Coverage(0, (), ()))


@dataclass
class _Selection:
    """The configurations of a build: the first `n` candidates that are new and pass the filter."""

    build: Build
    journal: JournalWriter
    accepted: list[Assignment] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    static: dict[str, StaticEstimate] = field(default_factory=dict)
    """By spec id, from the layer table that the filter returned; a spec is filtered once."""
    note: str | None = None
    reason: str = "see vramcast build status"
    """The reason of the last rejection."""

    def specs(self) -> Iterator[Spec]:
        """Yield the specs that have no row yet, and write rejections to the journal."""
        useless = 0
        for values in self.build.sampler.candidates(self.build.space, self.build.seed):
            if len(self.accepted) >= self.build.n:
                return
            spec = self.build.space.spec(values)
            if spec.id in self.seen or not self._passes(spec):
                useless += 1
                if useless >= _MAX_USELESS:
                    break
                continue
            useless = 0
            self.accepted.append(values)
            if spec.id not in self.journal.row_ids:
                yield spec
        if not self.accepted:
            raise UserError(
                f"expected configurations that can run in the space {self.build.space.name}, found none among "
                f"{len(self.seen)} (the last was rejected with: {self.reason}): change the space"
            )
        if len(self.accepted) < self.build.n:
            self.note = (
                f"the sampler found {len(self.accepted)} configurations that can run, fewer than n={self.build.n}: "
                "use sampler=combined or a wider space for more"
            )

    def _passes(self, spec: Spec) -> bool:
        self.seen.add(spec.id)
        if spec.id in self.journal.row_ids:
            return True
        if spec.id in self.journal.rejected_ids:
            return False
        if spec.family not in FAMILIES:  # of a library: only its own code knows
            return True
        verdict = check(spec)
        if isinstance(verdict, Rejected):
            self.reason = verdict.reason
            self.journal.append(Rejection(spec, verdict.reason))
            return False
        self.static[spec.id] = static_estimate(spec.training, verdict)
        return True


def find_assignments(build: Build, row_ids: set[str]) -> list[Assignment]:
    """Return the assignments behind rows, by running the sampler again."""
    missing, assignments, useless = set(row_ids), [], 0
    for values in build.sampler.candidates(build.space, build.seed):
        if not missing or useless >= _MAX_USELESS:
            break
        spec = build.space.spec(values)
        useless += 1
        if spec.id in missing:
            missing.remove(spec.id)
            assignments.append(values)
            useless = 0
    return assignments


def report_coverage(build: Build, result: Coverage, max_pairs: int | None = None) -> str:
    """Return the coverage report of a build."""
    return coverage_report(result, build.sampler.details(build.space), max_pairs)


def run(
    build: Build, executor: Executor, on_row: Callable[[Row], object], on_start: Callable[[int], None]
) -> BuildResult:
    """Run or resume a build. `on_start` gets the number of rows that exist already, `on_row` each new row."""
    versions = software_versions()
    with JournalWriter(build.out, build.settings) as journal:
        result = BuildResult(resumed=len(journal.row_ids), notes=[journal.torn] if journal.torn else [])
        on_start(min(result.resumed, build.n))
        selection = _Selection(build, journal)
        outcomes = executor.run(build.backend, selection.specs())
        try:
            with TableWriter(build.out) as tables:
                for spec, measured in outcomes:
                    if measured.table is not None:
                        tables.append(spec, measured.table)
                    static = selection.static.pop(spec.id, None)
                    for row in _rows(build, spec, measured, versions, static):
                        if row.spec.id not in journal.row_ids:
                            journal.append(row)
                            on_row(row)
        finally:
            outcomes.close()
        result.rows, result.rejected = len(journal.row_ids), len(journal.rejected_ids)
        result.notes += [selection.note] if selection.note else []
        result.coverage = coverage(build.space, selection.accepted)
        with replacing(build.out / COVERAGE_NAME) as path:
            path.write_text(report_coverage(build, result.coverage))
    return result


def _rows(
    build: Build, spec: Spec, measured: BackendResult, versions: Mapping[str, str], static: StaticEstimate | None
) -> Iterator[Row]:
    """Yield the rows of a spec; its own comes last, so that with it all rows of the network are written."""
    for sibling, outcome in (*measured.siblings, (spec, measured)):
        estimate = static if measured.table is None else static_estimate(sibling.training, measured.table)
        yield make_row(build.backend, sibling, outcome, build.seed, versions, estimate)


def run_with_bar(build: Build, executor: Executor, title: str | None = None) -> BuildResult:
    """Run or resume a build with a progress bar; existing rows count as done, but not towards the speed."""
    with bar(total=build.n, unit="row", desc=title) as shown:

        def start(done: int) -> None:
            shown.n = shown.initial = done
            shown.refresh()

        return run(build, executor, lambda _: shown.update(), start)


def make_row(
    backend: Backend,
    spec: Spec,
    result: BackendResult,
    seed: int | None,
    versions: Mapping[str, str],
    static: StaticEstimate | None = None,
) -> Row:
    """Return a row: a spec with its estimate and measurement, and where they come from."""
    provenance = Provenance(
        origin=backend.origin,
        backend=backend.name,
        device=result.device or backend.device,
        versions={**versions, **result.versions},
        seed=seed,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu_uuid=result.gpu_uuid,
    )
    return Row(spec, static, result.measurement, provenance, result.needs)


def software_versions() -> dict[str, str]:
    """Return the versions that a row was made with."""
    return {"python": platform.python_version(), "torch": version("torch"), "vramcast": version("vramcast")}
