"""The card of a checkpoint (its README) and the figures on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vramcast.dataset_builder.store.importers import BACKEND as PUBLISHED
from vramcast.dataset_builder.store.importers.gpumemnet import CITATION
from vramcast.dataset_builder.store.importers.xmem import CITATION as XMEM_CITATION
from vramcast.models.calibration import LEAST_ROWS
from vramcast.models.checkpoint import Card
from vramcast.models.comparison import EstimatorReport
from vramcast.models.example import Example
from vramcast.train.configuration import Configuration
from vramcast.train.data import CUDA, VIRTUAL
from vramcast.train.experiment import ESTIMATOR, Parts

_FIGURES = (
    "rows", "accuracy", "macro_f1", "too_low", "safe_too_low", "over_reservation_mib",
    "safe_over_relative_median", "median_relative_error",
    "mean_relative_error", "p95_relative_error", "oom_recall", "oom_false_alarms",
)  # fmt: skip
_ORIGINS = {
    PUBLISHED: "Measured by others on the stacks {sources}: maxima of nvidia-smi or NVML, and 'does not fit'.",
    CUDA: "Measured by vramcast on {sources}.",
    VIRTUAL: "Simulated by vramcast's virtual GPU, without a GPU.",
}
"""Sentences by the backend of the rows."""


def figures_of(configuration: Configuration, reports: Mapping[str, EstimatorReport]) -> dict[str, Any]:
    """Return the figures on test rows: overall, by family, and the accuracy of the best baseline."""
    report = reports[ESTIMATOR]
    overall = report.overall.to_json()
    figures: dict[str, Any] = {"bucket_mib": configuration.network.bucket_mib, "risk": configuration.risk}
    figures |= {name: overall[name] for name in _FIGURES}
    figures |= {f"accuracy of {name}": part.accuracy for name, part in report.by_family.items()}
    others = {name: report.overall.accuracy or 0.0 for name, report in reports.items() if name != ESTIMATOR}
    best = max(others, key=lambda name: others[name])
    return {**figures, f"accuracy of the best baseline ({best})": others[best]}


def card_of(configuration: Configuration, parts: Parts, title: str | None) -> Card:
    """Return the card of an estimator that was trained on these parts."""
    network = configuration.network
    published = any(example.backend == PUBLISHED for example in parts.train)
    return Card(
        title=title or "GPU memory of training jobs",
        summary=(
            f"{_kind(configuration)} It predicts the distribution of the GPU memory that a training job takes, from "
            f"which buckets of any width follow. It is evaluated below at {network.bucket_mib} MiB."
        ),
        data="\n\n".join(_data_lines(parts, configuration.data.tables)),
        licence=_licence(parts) if published else "the licence of vramcast",
        citation=_citation(parts) if published else "vramcast",
        command=configuration.run.command or "vramcast train",
    )


def _has_xmem(parts: Parts) -> bool:
    return any("xmem" in example.source for example in parts.train)


def _citation(parts: Parts) -> str:
    return f"{CITATION}; {XMEM_CITATION}" if _has_xmem(parts) else CITATION


def _licence(parts: Parts) -> str:
    return "CC BY 4.0 (GPUMemNet), MIT (xMem)" if _has_xmem(parts) else "CC BY 4.0"


def _kind(configuration: Configuration) -> str:
    network = configuration.network
    if not configuration.members:
        return (
            "The virtual GPU's simulation, with the errors that it showed on measured jobs, by what is uncertain in a "
            f"job. A stratum of fewer than {LEAST_ROWS} rows is replaced by a wider one."
        )
    return (
        f"An ensemble of {configuration.members} networks of the kind '{network.network}' over the features "
        f"'{network.features}'."
    )


def _data_lines(parts: Parts, by_architecture: bool) -> Sequence[str]:
    sources = {name: {item.source for item in parts.train if item.backend == name} for name in _ORIGINS}
    origins = [
        text.format(sources=", ".join(sorted(sources[name]))) for name, text in _ORIGINS.items() if sources[name]
    ]
    unit = "architecture" if by_architecture else "configuration of the network"
    split = f"Split by {unit}: {parts.describe()} rows. The figures are from the test rows."
    return [*origins, f"Training rows by family: {_counts(parts.train)}.", split]


def _counts(examples: Sequence[Example]) -> str:
    counts = Counter(example.family for example in examples)
    return ", ".join(f"{family} {count}" for family, count in sorted(counts.items()))
