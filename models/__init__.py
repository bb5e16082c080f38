"""Estimators, and answers for new jobs."""

from typing import TYPE_CHECKING

from vramcast.defaults import CHECKPOINT
from vramcast.models.answer import Answer, Bucket
from vramcast.models.buckets import Buckets
from vramcast.models.estimators._base import Estimator
from vramcast.models.example import Example, Label

if TYPE_CHECKING:
    from vramcast.models.predictor import Predictor


def load(name: str = CHECKPOINT) -> "Predictor":
    """Return the predictor of a checkpoint, by its released name or its directory."""
    from vramcast.models.predictor import Predictor  # noqa: PLC0415 - imports torch

    return Predictor.load(name)


__all__ = ["Answer", "Bucket", "Buckets", "Estimator", "Example", "Label", "load"]
