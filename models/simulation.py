"""Virtual estimates of many specs, kept in a journal: none is computed twice while the virtual GPU stays as it is."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.measure import Backend, Outcome
from vramcast.dataset_builder.measure.virtual import VirtualBackend
from vramcast.dataset_builder.pipeline import software_versions
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.schema import LayerTable, Provenance, Row, Spec
from vramcast.dataset_builder.store import JOURNAL_NAME, JournalWriter, iter_records
from vramcast.models.tables import TableCache, hashes_of
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.records import content_hash

_DECISIVE = ("virtual_gpu", "dataset_builder/families", "dataset_builder/plan.py", "dataset_builder/subject.py")
"""Sources that decide what the virtual GPU says of a spec."""
_TIMEOUT_SECONDS = 600.0


@cache
def source_hash() -> str:
    """A hash over the sources of the virtual GPU, and torch's version, whose operators it traces."""
    return content_hash({"sources": hashes_of(_DECISIVE), "torch": torch.__version__})


class SimulationCache:
    """A directory of journals, one for each device profile and state of the virtual GPU."""

    def __init__(self, directory: Path | str, workers: int) -> None:
        self.directory = Path(directory)
        self.workers = workers

    def measure(self, specs: Iterable[Spec], profile: DeviceProfile) -> dict[str, Measurement]:
        """The virtual measurement of each spec by its id; one that came to none is told and left out."""
        wanted = {spec.id: spec for spec in specs}
        journal = self._journal(profile)
        known = dict(_read(journal, wanted))
        missing = [spec for key, spec in wanted.items() if key not in known]
        if missing:
            known.update(self._simulate(missing, profile, journal))
        return known

    def tables(self, specs: Iterable[Spec]) -> dict[str, LayerTable]:
        """The layer table of each spec by its id, kept beside the simulations."""
        return TableCache(self.directory / "tables", self.workers).tables(specs)

    def _journal(self, profile: DeviceProfile) -> Path:
        return self.directory / content_hash({"profile": asdict(profile), "source": source_hash()})

    def _simulate(
        self, specs: list[Spec], profile: DeviceProfile, directory: Path
    ) -> Iterator[tuple[str, Measurement]]:
        backend, versions = VirtualBackend(profile), software_versions()
        with JournalWriter(directory, {"profile": asdict(profile), "source": source_hash()}) as journal:
            for spec, outcome in self._outcomes(backend, specs):
                if outcome.measurement.status not in (Status.OK, Status.OOM):
                    print(f"note: {spec.id} was not simulated: {outcome.measurement.evidence}", file=sys.stderr)
                    continue
                journal.append(_row(backend, spec, outcome, versions))
                yield spec.id, outcome.measurement

    def _outcomes(self, backend: Backend, specs: list[Spec]) -> Iterator[tuple[Spec, Outcome]]:
        outcomes = LocalExecutor(self.workers, _TIMEOUT_SECONDS).run(backend, specs)
        yield from bar(outcomes, total=len(specs), unit="row", desc="virtual GPU")


def _read(directory: Path, wanted: Mapping[str, Spec]) -> Iterator[tuple[str, Measurement]]:
    if (directory / JOURNAL_NAME).exists():
        for record in iter_records(directory):
            if isinstance(record, Row) and record.spec.id in wanted:
                yield record.spec.id, record.measurement


def _row(backend: VirtualBackend, spec: Spec, outcome: Outcome, versions: Mapping[str, str]) -> Row:
    provenance = Provenance(
        origin=backend.origin, backend=backend.name, device=backend.device, versions=versions, seed=None, time=""
    )
    return Row(spec, outcome.static, outcome.measurement, provenance)
