"""Validated parts of a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramcast.dataset_builder.store.splits import make_split
from vramcast.errors import UserError, check_amount, check_choice, check_count
from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.families import FAMILIES

LIBRARIES = ("torchvision", "hf")
"""Libraries whose networks `data.networks` can name; timm's networks are in the tables."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of the training loop (`conf/trainer`)."""

    epochs: int
    patience: int
    """Training stops after this many epochs without a better validation loss."""
    batch_size: int
    learning_rate: float
    weight_decay: float
    gradient_clip: float
    """The maximum norm of gradients: a single outlier with a likelihood near zero would dominate a step."""
    threads: int
    """Threads of torch. Another number may change the last digits of a result."""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size", "threads"):
            check_count(f"trainer.{name}", getattr(self, name))
        for name in ("learning_rate", "gradient_clip"):
            check_amount(f"trainer.{name}", getattr(self, name), zero=False)
        check_amount("trainer.weight_decay", self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The training data: tables of measurements below `path`, virtual rows that are built, or both."""

    name: str
    families: str | Sequence[str] | None = None
    """The families to use; None for all."""
    path: str | None = None
    files: Sequence[str] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    """Rows of tables to use, by a pattern of their names; whole networks are drawn at random with `seed`."""
    cache: str | None = None
    rows: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Virtual rows by family."""
    optimizers: Sequence[str] = ()
    """Optimizers under which the libraries' networks (of the tables and of `networks`) are also simulated."""
    networks: Sequence[str] = ()
    """Networks that no table has, such as torchvision:vgg11, to simulate under each of `optimizers`."""
    tables: bool = False
    """Examples have detailed layer tables and no simulation; networks of one architecture stay together in splits."""
    plain_share: float = 0.0
    """Share of the training rows that are also learned from a table without details, as other tools write it."""
    builds: Sequence[str] = ()
    """Directories of `vramcast build`; their rows replace the virtual rows that `counts` asks for."""
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("path", "rows", "cache", "device"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise UserError(f"expected data.{name} to be a text, found {value!r}: use data.{name}=...")
        if not isinstance(self.counts, Mapping) or not all(isinstance(item, str) for item in self.counts):
            raise UserError(f"expected data.counts to be rows by family, found {self.counts!r}: change it")
        for family, count in self.counts.items():
            check_choice("a family of data.counts", family, FAMILIES)
            check_count(f"data.counts.{family}", count, least=0)
        for pattern, count in self.most.items():
            check_count(f"data.most.{pattern}", count)
        for optimizer in self.optimizers:
            check_choice("an optimizer of data.optimizers", optimizer, OPTIMIZERS)
        for name in ("builds", "networks"):
            value = getattr(self, name)
            texts = isinstance(value, Sequence) and all(isinstance(item, str) for item in value)
            if isinstance(value, str) or not texts:
                raise UserError(f"expected data.{name} to be a list of texts, found {value!r}: change it")
        for network in self.networks:
            check_choice(f"the library of {network!r} in data.networks", network.partition(":")[0], LIBRARIES)
        if self.networks and not self.optimizers:
            raise UserError("expected data.optimizers for data.networks, found none: name at least one optimizer")
        check_count("data.seed", self.seed, least=0)
        self.wanted_families()

    def wanted_families(self) -> tuple[str, ...] | None:
        """Return the families to use, or None for all."""
        if self.families is None:
            return None
        families = [self.families] if isinstance(self.families, str) else self.families
        if not isinstance(families, Sequence) or not families:
            raise UserError(f"expected data.families to be a list such as [cnn, timm], found {families!r}: change it")
        for family in families:
            check_choice("a family of data.families", family, (*FAMILIES, "timm"))
        return tuple(families)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where a run is stored, and how to repeat it."""

    root: str
    name: str
    resume: str | None = None
    command: str | None = None
    """The command that repeats the run."""

    def __post_init__(self) -> None:
        for name in ("root", "name"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise UserError(f"expected run.{name} to be a text, found {value!r}: use run.{name}=...")
        if "/" in self.name:
            raise UserError(f"expected run.name to be a word, found {self.name!r}: set the directory with run.root")


PARTS = ("train", "validation", "test")


def check_split(fractions: Mapping[str, Any]) -> None:
    """Raise UserError for missing parts or invalid fractions, before any row is built."""
    if set(fractions) != set(PARTS):
        raise UserError(f"expected the parts {list(PARTS)} in split, found {list(fractions)}: name them all")
    make_split(PARTS, fractions, seed=0)
