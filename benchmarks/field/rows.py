"""The rows that all estimators are judged on: none of them was trained on any."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.schema import Row, Spec
from vramcast.dataset_builder.store.importers import read_rows, real_networks
from vramcast.dataset_builder.store.splits import in_half
from vramcast.errors import UserError
from vramcast.models.checkpoint import RELEASED, load_metrics
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.models.simulation import SimulationCache
from vramcast.train.configuration import configure
from vramcast.train.data import measured_rows
from vramcast.train.experiment import Parts, parts_of, split_of
from vramcast.train.tasks.release import RELEASES, read_release

UNIVERSAL = "universal"
UNSEEN_TABLE = "unseen_models_a100.csv"
UNSEEN, UNSEEN_2024, BLIND_TIMM = "unseen", "unseen 2024", "timm, odd half"
TITLES = {
    "mlp": "GPUMemNet's MLPs",
    "cnn": "GPUMemNet's CNNs, all seven shapes",
    "transformer": "GPUMemNet's Transformers",
    "timm": "timm networks",
    BLIND_TIMM: "timm networks of the odd half, on which no constant was fitted",
    UNSEEN: "Real networks that nothing was trained on, on four stacks",
    UNSEEN_2024: "The same on GPUMemNet's stack of 2024, with the published estimates",
}
"""The parts, in the order of their tables."""


@dataclass(frozen=True)
class Asked:
    """One measured row that estimators are asked about."""

    example: Example
    spec: Spec
    parts: tuple[str, ...]
    """Of `TITLES`; the first one is its family."""
    name: str = ""
    """What the table calls it, where that says more than its factors."""

    @property
    def family(self) -> str:
        return self.parts[0]


@dataclass(frozen=True)
class Field:
    """What is learned from, and what is asked about."""

    train: Sequence[Example]
    validation: Sequence[Example]
    asked: Sequence[Asked]

    @property
    def examples(self) -> list[Example]:
        return [item.example for item in self.asked]

    def counts(self) -> dict[str, int]:
        """Rows that are asked about, by part."""
        return {part: sum(part in item.parts for item in self.asked) for part in TITLES}


def load_field(data: Path, cache: str, workers: int) -> Field:
    """The split of the released checkpoint, made again, and the unseen networks beside its test rows."""
    words = [*read_release(RELEASES / f"{UNIVERSAL}.yaml").overrides, f"data.path={data}", f"data.cache={cache}"]
    configuration, simulations = configure(words), SimulationCache(cache, workers)
    rows = measured_rows(configuration.data)
    examples = sorted(_examples(rows, simulations), key=lambda example: (example.source, example.id))
    parts = parts_of(examples, split_of(examples, configuration))
    _check_released(parts)
    specs = {row.spec.id: row.spec for row in rows}
    tested = [Asked(item, specs[item.id], _parts(item, specs[item.id])) for item in parts.test]
    return Field(parts.train, parts.validation, [*tested, *_unseen(data, simulations)])


def _examples(rows: Sequence[Row], cache: SimulationCache) -> list[Example]:
    profiles = {name: load_profile(name) for name in {str(row.provenance.device) for row in rows}}
    return examples_of_rows(rows, profiles, cache)


def _parts(example: Example, spec: Spec) -> tuple[str, ...]:
    blind = example.family == "timm" and in_half(spec, "odd")
    return (example.family, BLIND_TIMM) if blind else (example.family,)


def _check_released(parts: Parts) -> None:
    """The split follows from rows and seed: with other rows, some that were trained on would be judged."""
    kept = load_metrics(RELEASED / UNIVERSAL)["rows"]
    if kept != len(parts.test):
        raise UserError(
            f"expected the {kept} test rows of the checkpoint {UNIVERSAL}, found {len(parts.test)}: "
            "name the tables that it was trained on, or release it anew"
        )


def _unseen(data: Path, cache: SimulationCache) -> list[Asked]:
    path = unseen_table(data)
    names, rows = _names(path), list(read_rows(path))
    found = []
    for year in dict.fromkeys(row.provenance.time for row in rows):  # one job has several figures, and one id
        chosen = [row for row in rows if row.provenance.time == year]
        specs = {row.spec.id: row.spec for row in chosen}
        parts = (UNSEEN, UNSEEN_2024) if year == "2024" else (UNSEEN,)
        found += [Asked(item, specs[item.id], parts, names[item.id]) for item in _examples(chosen, cache)]
    return found


def _names(path: Path) -> dict[str, str]:
    with path.open(newline="") as lines:
        specs = [(real_networks.LAYOUT.spec(record), record["model"]) for record in csv.DictReader(lines)]
    return {spec.id: name for spec, name in specs if spec is not None}


def unseen_table(data: Path) -> Path:
    """Where the table of unseen networks is."""
    found = sorted(data.rglob(UNSEEN_TABLE))
    if not found:
        raise UserError(f"expected {UNSEEN_TABLE} below {data}, found none: set VRAMCAST_DATA")
    return found[0]
