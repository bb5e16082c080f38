"""Layer tables of libraries' networks, kept on disk: building hundreds takes minutes, and a table is small."""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import dataset_builder
from dataset_builder.families import FAMILIES
from dataset_builder.inspection.jobs import table_of
from dataset_builder.schema import LayerRecord, LayerTable, Spec, content_hash

_DECISIVE = ("analysis", "families")
"""Sources below dataset_builder that decide what layers a library's network is said to have."""
_LIBRARIES = ("timm", "transformers", "torchvision")


@cache
def _source_hash() -> str:
    root = Path(dataset_builder.__file__).parent
    paths = [path for part in _DECISIVE for path in sorted((root / part).rglob("*.py"))]
    contents = {str(path.relative_to(root)): sha256(path.read_bytes()).hexdigest() for path in paths}
    return content_hash({"sources": contents, "torch": torch.__version__, "libraries": list(map(_version, _LIBRARIES))})


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
        kept = {path: _read(path) for path in set(paths.values())}
        return found | {key: kept[path] for key, path in paths.items()}

    def _path(self, spec: Spec) -> Path:
        key = content_hash({"family": spec.family, "network": dict(spec.network), "source": _source_hash()})
        return self.directory / f"{key}.json"

    def _make(self, missing: dict[Path, Spec]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self.workers, len(missing)), context) as pool:
            made = pool.map(_table_text, missing.values())
            for path, text in zip(missing, _told(made, len(missing)), strict=True):
                _write(path, text)


def _told(made: Iterator[str], count: int) -> Iterable[str]:
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(made, total=count, unit="network", desc="layer tables", mininterval=interval)


def _table_text(spec: Spec) -> str:
    return json.dumps(asdict(table_of(spec)))


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def _read(path: Path) -> LayerTable:
    stored = json.loads(path.read_text())
    return LayerTable(
        layers=tuple(
            LayerRecord(**{**layer, "output_shape": tuple(layer["output_shape"])}) for layer in stored["layers"]
        ),
        trainable_shapes=tuple(tuple(shape) for shape in stored["trainable_shapes"]),
        input_elements=stored["input_elements"],
    )


def _layer(output_shape: list[int], **others: Any) -> LayerRecord:
    return LayerRecord(output_shape=tuple(output_shape), **others)
