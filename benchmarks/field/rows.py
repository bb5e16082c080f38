"""The test rows, on which no estimator was trained."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.dataset_builder.store.importers import read_rows, real_networks
from vramcast.dataset_builder.store.splits import in_half
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.models.checkpoint import load_metrics
from vramcast.models.example import Example
from vramcast.models.examples import examples_of_rows
from vramcast.models.released import RELEASED
from vramcast.train.configuration import configure
from vramcast.train.data import measured_rows
from vramcast.train.experiment import Parts, parts_of, split_of
from vramcast.train.tasks.release import RELEASES, read_release

UNIVERSAL = "universal"
XMEM_TRANSFORMERS = "4.51.3"
"""The release of transformers that xMem's runs used: later ones allocate up to 12 % less or more."""
UNSEEN_TABLE = "unseen_models_a100.csv"
UNSEEN, UNSEEN_2024, BLIND_TIMM = "unseen", "unseen 2024", "timm, odd half"
TITLES = {
    "mlp": "GPUMemNet's MLPs",
    "cnn": "GPUMemNet's CNNs, all seven shapes",
    "transformer": "GPUMemNet's Transformers",
    "timm": "timm networks",
    BLIND_TIMM: "timm networks of the odd half, to which no constant was fitted",
    "hf": "xMem's Transformers, on an RTX 3060, an RTX 4060 and an A100",
    "torchvision": "xMem's CNNs, on an RTX 3060 and an RTX 4060",
    UNSEEN: "Real networks outside all training data, on four stacks",
    UNSEEN_2024: "The same on GPUMemNet's stack of 2024, with the published estimates",
}
"""Titles of the parts, in the order of their tables."""


@dataclass(frozen=True)
class EvaluatedRow:
    """One measured row that estimators predict."""

    example: Example
    spec: Spec
    parts: tuple[str, ...]
    """Keys of `TITLES`; the first one is the family."""
    name: str = ""
    """The network's name in the table, if it has one."""

    @property
    def family(self) -> str:
        return self.parts[0]


@dataclass(frozen=True)
class Field:
    """The rows of the comparison: for training, and to be predicted."""

    train: Sequence[Example]
    validation: Sequence[Example]
    tested: Sequence[EvaluatedRow]

    @property
    def examples(self) -> list[Example]:
        return [item.example for item in self.tested]

    def counts(self) -> dict[str, int]:
        """Return the number of test rows by part."""
        return {part: sum(part in item.parts for item in self.tested) for part in TITLES}


def load_field(data: Path, cache: str | None, workers: int) -> Field:
    """Repeat the split of the released checkpoint, and add the unseen networks to its test rows."""
    _check_transformers()
    words = [*read_release(RELEASES / f"{UNIVERSAL}.yaml").overrides, f"data.path={data}"]
    configuration, simulations = configure(words), SimulationStore(cache, workers)
    rows = measured_rows(configuration.data)
    examples = sorted(_examples(rows, simulations), key=lambda example: (example.source, example.id))
    parts = parts_of(examples, split_of(examples, configuration))
    _check_released(parts)
    specs = {row.spec.id: row.spec for row in rows}
    tested = [EvaluatedRow(item, specs[item.id], _parts(item, specs[item.id])) for item in parts.test]
    return Field(parts.train, parts.validation, [*tested, *_unseen(data, simulations)])


def _check_transformers() -> None:
    if (release := version("transformers")) != XMEM_TRANSFORMERS:
        raise UserError(
            f"expected transformers {XMEM_TRANSFORMERS}, which xMem's runs used, found {release}: run `make bench`, "
            "which installs it below .venvs, or name a directory with it in PYTHONPATH"
        )


def _examples(rows: Sequence[Row], cache: SimulationStore) -> list[Example]:
    profiles = {name: load_profile(name) for name in {str(row.provenance.device) for row in rows}}
    return examples_of_rows(rows, profiles, cache)


def _parts(example: Example, spec: Spec) -> tuple[str, ...]:
    blind = example.family == "timm" and in_half(spec, "odd")
    return (example.family, BLIND_TIMM) if blind else (example.family,)


def _check_released(parts: Parts) -> None:
    """Raise UserError if the rows differ from the release's: the split would test on rows that it was trained on."""
    released = load_metrics(RELEASED / UNIVERSAL)["rows"]
    if released != len(parts.test):
        raise UserError(
            f"expected the {released} test rows of the checkpoint {UNIVERSAL}, found {len(parts.test)}: "
            "name the tables that it was trained on, or release it again"
        )


def _unseen(data: Path, cache: SimulationStore) -> list[EvaluatedRow]:
    path = unseen_table(data)
    names, rows = _names(path), list(read_rows(path))
    unseen = []
    for year in dict.fromkeys(row.provenance.time for row in rows):  # an id repeats across years
        chosen = [row for row in rows if row.provenance.time == year]
        specs = {row.spec.id: row.spec for row in chosen}
        parts = (UNSEEN, UNSEEN_2024) if year == "2024" else (UNSEEN,)
        unseen += [EvaluatedRow(item, specs[item.id], parts, names[item.id]) for item in _examples(chosen, cache)]
    return unseen


def _names(path: Path) -> dict[str, str]:
    with path.open(newline="") as lines:
        specs = [(real_networks.LAYOUT.spec(record), record["model"]) for record in csv.DictReader(lines)]
    return {spec.id: name for spec, name in specs if spec is not None}


def unseen_table(data: Path) -> Path:
    """Return the path of the table of unseen networks."""
    paths = sorted(data.rglob(UNSEEN_TABLE))
    if not paths:
        raise UserError(f"expected {UNSEEN_TABLE} below {data}, found none: set VRAMCAST_DATA")
    return paths[0]
