"""Checkpoints: self-describing directories. Reading one needs only torch, numpy and safetensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.models.estimators._base import SavedEstimator
from vramcast.models.estimators.calibrated_simulation import CalibratedSimulation
from vramcast.models.estimators.classifiers import NetworkClassifier
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.storage import attach, read_kind

METRICS, CARD = "metrics.json", "README.md"
KINDS: Mapping[str, type[SavedEstimator]] = {
    NetworkClassifier.kind: NetworkClassifier,
    Ensemble.kind: Ensemble,
    CalibratedSimulation.kind: CalibratedSimulation,
}


@dataclass(frozen=True)
class Card:
    """The README of a checkpoint: what a user must know before relying on the estimator."""

    title: str
    summary: str
    data: str
    """The training rows, their origin and how they were measured."""
    licence: str
    citation: str
    command: str
    """The command that reproduces it."""
    limits: str = "It knows networks like those it was trained on, and flags others as out of distribution."


def save_checkpoint(estimator: SavedEstimator, directory: Path, metrics: Mapping[str, Any], card: Card) -> None:
    """Write an estimator with its figures and its card."""
    estimator.save(directory)
    attach(directory, {METRICS: (json.dumps(dict(metrics), indent=1, allow_nan=False) + "\n").encode()})
    with replacing(directory / CARD) as temporary:
        temporary.write_text(render_card(card, metrics), encoding="utf-8")


def load_checkpoint(directory: Path) -> SavedEstimator:
    """Read the estimator in a directory, of any kind."""
    kind = read_kind(directory)
    if kind not in KINDS:
        raise UserError(
            f"expected an estimator of a kind among {sorted(KINDS)} in {directory}, found {kind!r}: update vramcast"
        )
    return KINDS[kind].load(directory)


def load_metrics(directory: Path) -> dict[str, Any]:
    """Return the figures on the test rows of the training."""
    try:
        metrics: dict[str, Any] = json.loads((directory / METRICS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"expected figures in {directory / METRICS}, found: {error}; fetch or train it again"
        ) from error
    return metrics


def render_card(card: Card, metrics: Mapping[str, Any]) -> str:
    """Render the card as Markdown."""
    figures = "\n".join(f"| {name} | {_shown(value)} |" for name, value in metrics.items())
    return f"""# {card.title}

{card.summary}

## Figures

| figure | value |
| --- | --- |
{figures}

## Data

{card.data}

- Licence of the data: {card.licence}
- Please cite: {card.citation}

## Limits

{card.limits}

## Use

```python
from pathlib import Path
from vramcast.models.checkpoint import load_checkpoint

estimator = load_checkpoint(Path("."))  # this directory
```

Made with `{card.command}`.
"""


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
