"""Checkpoints: directories that explain themselves. Reading one needs torch, numpy and safetensors alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.store.durable import replacing
from vramcast.errors import UserError, suggestion
from vramcast.models._base import Estimator
from vramcast.models.classifiers import NetworkClassifier
from vramcast.models.ensemble import Ensemble
from vramcast.models.storage import attach, read_kind

RELEASED = Path(__file__).resolve().parent.parent / "checkpoints"
METRICS, CARD = "metrics.json", "README.md"
KINDS: Mapping[str, type[Estimator]] = {NetworkClassifier.kind: NetworkClassifier, Ensemble.kind: Ensemble}


@dataclass(frozen=True)
class Card:
    """What a person must know before relying on an estimator."""

    title: str
    summary: str
    data: str
    """Which rows it was trained on, where they come from and how they were measured."""
    licence: str
    citation: str
    command: str
    """What makes it again."""
    limits: str = "It knows networks like those it was trained on, and flags others as unfamiliar."


def save_checkpoint(estimator: Estimator, directory: Path, metrics: Mapping[str, Any], card: Card) -> None:
    """Write an estimator with its figures and its card."""
    estimator.save(directory)
    attach(directory, {METRICS: (json.dumps(dict(metrics), indent=1, allow_nan=False) + "\n").encode()})
    with replacing(directory / CARD) as temporary:
        temporary.write_text(render_card(card, metrics), encoding="utf-8")


def checkpoint_directory(name: str) -> Path:
    """Where a checkpoint lies: the directory of that path, or else of that name among the released ones."""
    if Path(name).is_dir():
        return Path(name)
    if (RELEASED / name).is_dir():
        return RELEASED / name
    known = sorted(path.name for path in RELEASED.iterdir() if path.is_dir()) if RELEASED.is_dir() else []
    hint = suggestion(name, known, "name another")
    raise UserError(f"expected a checkpoint's directory or a released one of {known}, found {name!r}: {hint}")


def load_checkpoint(directory: Path) -> Estimator:
    """Read the estimator in a directory, whatever its kind."""
    kind = read_kind(directory)
    if kind not in KINDS:
        raise UserError(
            f"expected an estimator of a kind among {sorted(KINDS)} in {directory}, found {kind!r}: update vramcast"
        )
    return KINDS[kind].load(directory)


def load_metrics(directory: Path) -> dict[str, Any]:
    """The figures that were measured when the estimator was trained."""
    try:
        found: dict[str, Any] = json.loads((directory / METRICS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"expected figures in {directory / METRICS}, found: {error}; fetch or train it again"
        ) from error
    return found


def render_card(card: Card, metrics: Mapping[str, Any]) -> str:
    """The card as Markdown."""
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
