"""What a checkpoint says of itself: its card, and the figures on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vramcast.dataset_builder.store.importers import BACKEND as PUBLISHED
from vramcast.dataset_builder.store.importers.gpumemnet import CITATION
from vramcast.models.checkpoint import Card
from vramcast.models.comparison import Report
from vramcast.models.example import Example
from vramcast.train.configuration import Configuration
from vramcast.train.data import CUDA, VIRTUAL
from vramcast.train.experiment import ESTIMATOR, Parts

_FIGURES = (
    "rows", "accuracy", "macro_f1", "too_low", "safe_too_low", "over_reservation_mib", "median_relative_error",
    "mean_relative_error", "p95_relative_error", "oom_recall", "oom_false_alarms",
)  # fmt: skip
_ORIGINS = {
    PUBLISHED: "Measured by others on NVIDIA A100 40 GB cards: maxima of nvidia-smi at 1 Hz, and 'does not fit'.",
    CUDA: "Measured by vramcast on cards like these: {sources}.",
    VIRTUAL: "Simulated by vramcast's virtual GPU; no figure was read off a card.",
}
"""By the backend of a row."""


def figures_of(configuration: Configuration, reports: Mapping[str, Report]) -> dict[str, Any]:
    """The figures on test rows: of all, of each family, and the accuracy of the best baseline."""
    found = reports[ESTIMATOR]
    overall = found.overall.to_json()
    figures: dict[str, Any] = {"bucket_mib": configuration.network.bucket_mib, "risk": configuration.risk}
    figures |= {name: overall[name] for name in _FIGURES}
    figures |= {f"accuracy of {name}": part.accuracy for name, part in found.by_family.items()}
    others = {name: report.overall.accuracy or 0.0 for name, report in reports.items() if name != ESTIMATOR}
    best = max(others, key=lambda name: others[name])
    return {**figures, f"accuracy of the best baseline ({best})": others[best]}


def card_of(configuration: Configuration, parts: Parts, title: str | None) -> Card:
    """The card of an estimator that was trained on these parts."""
    network = configuration.network
    published = any(example.backend == PUBLISHED for example in parts.train)
    return Card(
        title=title or f"GPU memory of training jobs, estimated by networks of the kind '{network.network}'",
        summary=(
            f"An ensemble of {configuration.members} networks of the kind '{network.network}' over the features "
            f"'{network.features}'. It gives a distribution of the memory that a training job uses on its device, from "
            f"which buckets of any width follow; it was trained, and is judged below, at {network.bucket_mib} MiB."
        ),
        data="\n\n".join(_data_lines(parts)),
        licence="CC BY 4.0" if published else "that of vramcast",
        citation=CITATION if published else "vramcast",
        command=configuration.run.command or "python -m train",
    )


def _data_lines(parts: Parts) -> Sequence[str]:
    sources = {name: {item.source for item in parts.train if item.backend == name} for name in _ORIGINS}
    kinds = [text.format(sources=", ".join(sorted(sources[name]))) for name, text in _ORIGINS.items() if sources[name]]
    split = f"Split by configuration of the network: {parts.describe()} rows; the figures are those of the test rows."
    return [*kinds, f"Training rows by family: {_counts(parts.train)}.", split]


def _counts(examples: Sequence[Example]) -> str:
    found = Counter(example.family for example in examples)
    return ", ".join(f"{family} {count}" for family, count in sorted(found.items()))
