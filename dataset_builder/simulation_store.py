"""A store of simulations on disk: no spec is simulated twice for one profile and one virtual GPU."""

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.backends import BackendResult
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.pipeline import make_row, software_versions
from vramcast.dataset_builder.store.cache import read_entry, read_rows, write_entry, writing
from vramcast.defaults import cache_directory
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.progress import bar
from vramcast.simulation.result import Peaks, Simulation
from vramcast.virtual_gpu.canonical import content_hash
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.simulate import without_limit
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
        self._tables: dict[Path, LayerTable] = {}

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
            settings = {"profile": asdict(profile), "versions": simulation_versions(family)}
            directory = self.directory / content_hash({**settings, "family": family})
            rows = read_rows(directory, settings, wanted)
            stored.update((key, row.measurement) for key, row in rows.items())
            if self._missing(wanted, rows):
                stored.update(self._simulate(wanted, profile, directory, settings))
        return stored

    def _missing(self, wanted: Mapping[str, Spec], rows: Container[str]) -> list[Spec]:
        return [spec for key, spec in wanted.items() if key not in rows or not self._has_table(spec)]

    def _simulate(
        self, wanted: Mapping[str, Spec], profile: DeviceProfile, directory: Path, settings: Mapping[str, Any]
    ) -> Iterator[tuple[str, Measurement]]:
        """Yield the missing measurements, and those that another process stored while this one waited for it."""
        backend, versions = VirtualBackend(profile, tables=True), software_versions()
        with writing(directory, settings, wanted) as (journal, rows):
            yield from ((key, row.measurement) for key, row in rows.items())
            missing = self._missing(wanted, rows)
            for spec, result in self._results(backend, missing) if missing else ():
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

    def _table(self, spec: Spec) -> LayerTable:
        if spec.family in FAMILIES:  # computed from the plan in milliseconds
            return table_of(spec)
        return self._tables[self._table_path(spec)]

    def _has_table(self, spec: Spec) -> bool:
        """Return whether there is a table, and keep it: its file may be lost before it is used."""
        path = self._table_path(spec)
        if spec.family not in FAMILIES and path not in self._tables:
            table = read_entry(path, LayerTable.from_json)
            if table is None:
                return False
            self._tables[path] = table
        return True

    def _table_path(self, spec: Spec) -> Path:
        key = {"family": spec.family, "network": dict(spec.network), "versions": simulation_versions(spec.family)}
        return self.directory / "tables" / f"{content_hash(key)}.json"

    def _write_table(self, spec: Spec, table: LayerTable) -> None:
        path = self._table_path(spec)
        self._tables[path] = table
        write_entry(path, table.to_json())
