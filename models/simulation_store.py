"""A store of simulations on disk: no spec is simulated twice for one profile and one virtual GPU."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vramcast.dataset_builder.defaults import cache_directory
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.jobs.job import table_of
from vramcast.dataset_builder.measure import BackendResult
from vramcast.dataset_builder.measure.virtual import VirtualBackend
from vramcast.dataset_builder.pipeline import make_row, software_versions
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.schema import LayerTable, Row, Spec
from vramcast.dataset_builder.simulation.simulation import Peaks, Simulation
from vramcast.dataset_builder.simulation.simulator import without_limit
from vramcast.dataset_builder.store import JOURNAL_NAME, JournalWriter, iter_records
from vramcast.dataset_builder.store.durable import replacing
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.records import content_hash
from vramcast.virtual_gpu.version import VERSION

_LIBRARIES = ("timm", "transformers", "torchvision", "diffusers")
_LIBRARIES_OF = {
    "timm": ("timm",),
    "hf": ("transformers",),
    "torchvision": ("torchvision",),
    "diffusers": ("diffusers",),
}
_TIMEOUT_SECONDS = 600.0


@cache
def simulation_versions(family: str | None = None) -> dict[str, str | int | None]:
    """Return the versions that decide a simulation: of the virtual GPU, torch, and the libraries of a family.

    A generated network depends on no library, one of a library on that library alone. Without a family, all count.
    """
    libraries = () if family in FAMILIES else _LIBRARIES_OF.get(str(family), _LIBRARIES)
    return {"virtual_gpu": VERSION, "torch": _installed("torch"), **{name: _installed(name) for name in libraries}}


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


class SimulationStore:
    """A directory with a journal of measurements for each profile and versions, and the tables of libraries' networks.

    Without a directory, simulations go to the user's cache.
    """

    def __init__(self, directory: Path | str | None = None, workers: int = 1) -> None:
        self.directory = Path(directory) if directory else cache_directory() / "simulations"
        self.workers = workers

    def simulate(
        self, specs: Iterable[Spec], profile: DeviceProfile, *, unbounded: bool = False
    ) -> dict[str, Simulation]:
        """Return the simulation of each spec by its id; specs that cannot be simulated are reported and left out.

        With `unbounded`, jobs that do not fit are also simulated on the device without a memory limit.
        """
        wanted = {spec.id: spec for spec in specs}
        measurements = self.measure(wanted.values(), profile)
        large = [wanted[key] for key, item in measurements.items() if item.status is Status.OOM]
        needs = self.measure(large, without_limit(profile)) if unbounded and large else {}
        return {
            key: Simulation(
                self._table(wanted[key]),
                wanted[key].training,
                {profile.name: Peaks(item, needs.get(key, item if item.status is Status.OK else None))},
                family=wanted[key].family,
            )
            for key, item in measurements.items()
        }

    def measure(self, specs: Iterable[Spec], profile: DeviceProfile) -> dict[str, Measurement]:
        """Return the simulated measurement of each spec by its id, without the layer tables."""
        by_family: dict[str, dict[str, Spec]] = defaultdict(dict)
        for spec in specs:
            by_family[spec.family][spec.id] = spec
        stored: dict[str, Measurement] = {}
        for family, wanted in by_family.items():
            journal = self._journal(profile, family)
            stored.update(_read(journal, wanted))
            missing = [spec for key, spec in wanted.items() if key not in stored or not self._has_table(spec)]
            if missing:
                stored.update(self._simulate(missing, profile, journal))
        return stored

    def _simulate(
        self, specs: list[Spec], profile: DeviceProfile, directory: Path
    ) -> Iterator[tuple[str, Measurement]]:
        backend, versions = VirtualBackend(profile, tables=True), software_versions()
        versions_of = simulation_versions(specs[0].family)
        with JournalWriter(directory, {"profile": asdict(profile), "versions": versions_of}) as journal:
            for spec, result in self._results(backend, specs):
                if result.measurement.status not in (Status.OK, Status.OOM):
                    print(f"note: {spec.id} was not simulated: {result.measurement.evidence}", file=sys.stderr)
                    continue
                if result.table is not None:
                    self._write_table(spec, result.table)
                if spec.id not in journal.row_ids:
                    journal.append(make_row(backend, spec, result, None, versions))
                yield spec.id, result.measurement

    def _results(self, backend: VirtualBackend, specs: list[Spec]) -> Iterator[tuple[Spec, BackendResult]]:
        results = LocalExecutor(self.workers, _TIMEOUT_SECONDS).run(backend, specs)
        yield from bar(results, total=len(specs), unit="row", desc="virtual GPU")

    def _journal(self, profile: DeviceProfile, family: str) -> Path:
        versions = simulation_versions(family)
        return self.directory / content_hash({"profile": asdict(profile), "family": family, "versions": versions})

    def _table(self, spec: Spec) -> LayerTable:
        if spec.family in FAMILIES:  # computed from the plan in milliseconds
            return table_of(spec)
        return _read_table(self._table_path(spec))

    def _has_table(self, spec: Spec) -> bool:
        return spec.family in FAMILIES or self._table_path(spec).exists()

    def _table_path(self, spec: Spec) -> Path:
        key = {"family": spec.family, "network": dict(spec.network), "versions": simulation_versions(spec.family)}
        return self.directory / "tables" / f"{content_hash(key)}.json"

    def _write_table(self, spec: Spec, table: LayerTable) -> None:
        path = self._table_path(spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(table.to_json()))


@cache
def _read_table(path: Path) -> LayerTable:
    return LayerTable.from_json(json.loads(path.read_text()))


def _read(directory: Path, wanted: Mapping[str, Spec]) -> Iterator[tuple[str, Measurement]]:
    if (directory / JOURNAL_NAME).exists():
        for record in iter_records(directory):
            if isinstance(record, Row) and record.spec.id in wanted:
                yield record.spec.id, record.measurement
