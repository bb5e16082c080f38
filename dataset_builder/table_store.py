"""A store of layer tables on disk: no network is run twice for its table."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from vramcast.dataset_builder.simulation_store import simulation_versions
from vramcast.dataset_builder.store.cache import read_entry, write_entry
from vramcast.defaults import cache_directory
from vramcast.jobs.job import detailed_table_of
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.progress import bar
from vramcast.virtual_gpu.canonical import content_hash
from vramcast.virtual_gpu.training.setup import TrainingSetup


class TableStore:
    """A directory with the detailed table of each network. Without a directory, tables go to the user's cache."""

    def __init__(self, directory: Path | str | None = None) -> None:
        self.directory = (Path(directory) if directory else cache_directory()) / "tables"

    def tables(self, specs: Iterable[Spec]) -> dict[str, LayerTable]:
        """Return tables by the groups of their specs; networks that cannot be built are reported and left out."""
        by_group = {spec.group: spec for spec in specs}
        tables: dict[str, LayerTable] = {}
        for group, spec in bar(by_group.items(), total=len(by_group), unit="network", desc="layer tables"):
            table = self._table(spec)
            if table is not None:
                tables[group] = table
        return tables

    def _table(self, spec: Spec) -> LayerTable | None:
        training = TrainingSetup(batch_size=1, loss=spec.training.loss, adapter=spec.training.adapter)
        key = {"network": replace(spec, training=training).to_json(), "versions": simulation_versions(spec.family)}
        path = self.directory / f"{content_hash(key)}.json"
        table = read_entry(path, LayerTable.from_json)
        if table is None:
            try:
                table = detailed_table_of(replace(spec, training=training))
            except Exception as error:  # a network of a library may fail in any way
                print(f"note: {spec.id} has no layer table: {error}", file=sys.stderr)
                return None
            write_entry(path, table.to_json())
        return table
