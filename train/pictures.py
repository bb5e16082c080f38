"""Draws all pictures of a run, each with its table as CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vramcast.models.buckets import Buckets, choose_bucket
from vramcast.models.estimators._base import Estimator
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.example import Example
from vramcast.train.experiment import Parts
from vramcast.train.figures import (
    confusion_table,
    curves_table,
    draw_confusion,
    draw_curves,
    draw_projections,
    draw_reliability,
    projections_table,
    reliability_table,
)


def draw_all(
    directory: Path,
    estimator: Estimator,
    parts: Parts,
    buckets: Buckets,
    history: Mapping[str, Sequence[Mapping[str, float]]],
) -> None:
    """Draw confusion and reliability; of an ensemble also learning curves, and projections of the features."""
    directory.mkdir(exist_ok=True)
    _draw_predictions(directory, estimator, parts, buckets)
    if not isinstance(estimator, Ensemble):
        return
    curves = curves_table(history)
    curves.to_csv(directory / "curves.csv", index=False)
    draw_curves(curves, f"{estimator.name}: loss of {len(history)} members", directory / "curves.png")
    _draw_features(directory, estimator, parts, buckets)


def _draw_predictions(directory: Path, estimator: Estimator, parts: Parts, buckets: Buckets) -> None:
    truth = buckets.of([_needed_bytes(example) for example in parts.test])
    probabilities = estimator.predict_proba(parts.test, buckets)
    predicted = choose_bucket(probabilities)
    confusion = confusion_table(truth, predicted, buckets)
    confusion.to_csv(directory / "confusion.csv")
    title = f"{estimator.name}: {np.mean(predicted == truth):.1%} of {len(truth)} test rows in the right bucket"
    draw_confusion(confusion, buckets, title, directory / "confusion.png")
    reliability = reliability_table(probabilities, truth)
    reliability.to_csv(directory / "reliability.csv")
    draw_reliability(reliability, f"{estimator.name}: {len(truth)} test rows", directory / "reliability.png")


def _draw_features(directory: Path, estimator: Ensemble, parts: Parts, buckets: Buckets) -> None:
    first = estimator.members[0]
    classes = buckets.of([_needed_bytes(example) for example in parts.train])
    table = projections_table(first.encoder_.matrix(parts.train), classes, first.settings.seed)
    table.to_csv(directory / "projections.csv", index=False)
    title = f"Features '{first.settings.features}' of {len(table)} of {len(classes)} training rows"
    draw_projections(table, buckets, title, directory / "projections.png")


def _needed_bytes(example: Example) -> float:
    return example.measured.used_bytes if example.measured.fits else float("inf")
