"""A build: space -> sampler -> spec -> filter -> backend -> row -> journal. Here alone all stages meet."""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.executors import Executor
from vramcast.dataset_builder.filters import Rejected, check
from vramcast.dataset_builder.measure import Backend, Outcome
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.samplers import Sampler
from vramcast.dataset_builder.samplers.coverage import Coverage, coverage, report
from vramcast.dataset_builder.schema import Provenance, Rejection, Row, Spec
from vramcast.dataset_builder.space import Assignment, Space
from vramcast.dataset_builder.store import JournalWriter
from vramcast.dataset_builder.store.durable import replacing
from vramcast.errors import UserError

COVERAGE_NAME = "coverage.md"
_MOST_IN_VAIN = 5_000
"""Candidates in a row that bring nothing new before a space counts as used up."""


@dataclass(frozen=True)
class Build:
    """All that decides a build's rows, and where they go."""

    space: Space
    sampler: Sampler
    backend: Backend
    n: int
    seed: int
    out: Path
    settings: Mapping[str, Any]
    """The same as plain values, for the journal's header."""


@dataclass
class Report:
    """What a run of a build did."""

    rows: int = 0
    resumed: int = 0
    rejected: int = 0
    notes: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=lambda: Coverage(0, (), ()))


@dataclass
class _Selection:
    """The build's configurations: the first `n` of the sampler's stream that are new and pass the filter."""

    build: Build
    journal: JournalWriter
    accepted: list[Assignment] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    note: str | None = None
    reason: str = "see vramcast build status"
    """Of the last rejection."""

    def specs(self) -> Iterator[Spec]:
        """Those that have no row yet. Rejections are written down on the way."""
        in_vain = 0
        for values in self.build.sampler.candidates(self.build.space, self.build.seed):
            if len(self.accepted) >= self.build.n:
                return
            spec = self.build.space.spec(values)
            if spec.id in self.seen or not self._passes(spec):
                in_vain += 1
                if in_vain >= _MOST_IN_VAIN:
                    break
                continue
            in_vain = 0
            self.accepted.append(values)
            if spec.id not in self.journal.row_ids:
                yield spec
        if not self.accepted:
            raise UserError(
                f"expected configurations that can run in the space {self.build.space.name}, found none among "
                f"{len(self.seen)}; the last was refused for: {self.reason}: change the space"
            )
        if len(self.accepted) < self.build.n:
            self.note = (
                f"the sampler has {len(self.accepted)} configurations that can run, n={self.build.n} were asked for: "
                "use sampler=combined or a wider space for more"
            )

    def _passes(self, spec: Spec) -> bool:
        self.seen.add(spec.id)
        if spec.id in self.journal.row_ids:
            return True
        if spec.id in self.journal.rejected_ids:
            return False
        verdict = check(spec)
        if isinstance(verdict, Rejected):
            self.reason = verdict.reason
            self.journal.append(Rejection(spec, verdict.reason))
            return False
        return True


def selected(build: Build, row_ids: set[str]) -> list[Assignment]:
    """The assignments behind rows, found again by running the sampler once more."""
    left, found, in_vain = set(row_ids), [], 0
    for values in build.sampler.candidates(build.space, build.seed):
        if not left or in_vain >= _MOST_IN_VAIN:
            break
        spec = build.space.spec(values)
        in_vain += 1
        if spec.id in left:
            left.remove(spec.id)
            found.append(values)
            in_vain = 0
    return found


def run(build: Build, executor: Executor, on_row: Callable[[Row], object], on_start: Callable[[int], None]) -> Report:
    """Carry a build out, or on. `on_start` hears how many rows are there already, `on_row` each new one."""
    versions = software_versions()
    with JournalWriter(build.out, build.settings) as journal:
        result = Report(resumed=len(journal.row_ids), notes=[journal.torn] if journal.torn else [])
        on_start(min(result.resumed, build.n))
        selection = _Selection(build, journal)
        outcomes = executor.run(build.backend, selection.specs())
        try:
            for spec, outcome in outcomes:
                row = make_row(build.backend, spec, outcome, build.seed, versions)
                journal.append(row)
                on_row(row)
        finally:
            outcomes.close()
        result.rows, result.rejected = len(journal.row_ids), len(journal.rejected_ids)
        result.notes += [selection.note] if selection.note else []
        result.coverage = coverage(build.space, selection.accepted)
        with replacing(build.out / COVERAGE_NAME) as path:
            path.write_text(report(result.coverage))
    return result


def run_with_bar(build: Build, executor: Executor, title: str | None = None) -> Report:
    """The same with a bar, in which rows from before count, but not into the speed."""
    with bar(total=build.n, unit="row", desc=title) as shown:

        def start(done: int) -> None:
            shown.n = shown.initial = done
            shown.refresh()

        return run(build, executor, lambda _: shown.update(), start)


def make_row(backend: Backend, spec: Spec, outcome: Outcome, seed: int | None, versions: Mapping[str, str]) -> Row:
    """A spec with its outcome, and where that comes from."""
    provenance = Provenance(
        origin=backend.origin,
        backend=backend.name,
        device=outcome.device or backend.device,
        versions={**versions, **outcome.versions},
        seed=seed,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu_uuid=outcome.gpu_uuid,
    )
    return Row(spec, outcome.static, outcome.measurement, provenance)


def software_versions() -> dict[str, str]:
    """What a row was made with."""
    return {"python": platform.python_version(), "torch": version("torch"), "vramcast": version("vramcast")}
