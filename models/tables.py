"""Layer tables of libraries' networks, kept on disk: building hundreds takes minutes, and a table is small."""

import json
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import vramcast
from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.jobs.job import table_of
from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.schema import LayerTable, Spec
from vramcast.dataset_builder.store.durable import replacing
from vramcast.virtual_gpu.records import content_hash

_DECISIVE = ("dataset_builder/analysis", "dataset_builder/families")
"""Sources that decide what layers a library's network is said to have."""
_LIBRARIES = ("timm", "transformers", "torchvision")


def hashes_of(parts: Sequence[str]) -> dict[str, str]:
    """A hash of each source among some directories and files of vramcast."""
    root = Path(vramcast.__file__).parent
    paths = [path for part in parts for path in sorted((root / part).rglob("*.py")) or [root / part]]
    return {str(path.relative_to(root)): sha256(path.read_bytes()).hexdigest() for path in paths}


@cache
def _source_hash() -> str:
    libraries = [_version(name) for name in _LIBRARIES]
    return content_hash({"sources": hashes_of(_DECISIVE), "torch": torch.__version__, "libraries": libraries})


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


class TableCache:
    """A directory with a file for each network. Libraries are imported in child processes alone."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory = directory
        self.workers = workers

    def tables(self, specs: Iterable[Spec]) -> dict[str, LayerTable]:
        """The table of each spec by its id. Networks of our own families are planned in no time, and not kept."""
        wanted = list(specs)
        found = {spec.id: table_of(spec) for spec in wanted if spec.family in FAMILIES}
        paths = {spec.id: self._path(spec) for spec in wanted if spec.family not in FAMILIES}
        missing = {paths[spec.id]: spec for spec in wanted if spec.id in paths and not paths[spec.id].exists()}
        if missing:
            self._make(missing)
        kept = {path: LayerTable.from_json(json.loads(path.read_text())) for path in set(paths.values())}
        return found | {key: kept[path] for key, path in paths.items()}

    def _path(self, spec: Spec) -> Path:
        key = content_hash({"family": spec.family, "network": dict(spec.network), "source": _source_hash()})
        return self.directory / f"{key}.json"

    def _make(self, missing: dict[Path, Spec]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self.workers, len(missing)), context) as pool:
            made = bar(pool.map(_table_text, missing.values()), total=len(missing), unit="network", desc="layer tables")
            for path, text in zip(missing, made, strict=True):
                with replacing(path) as temporary:
                    temporary.write_text(text)


def _table_text(spec: Spec) -> str:
    return json.dumps(table_of(spec).to_json())
