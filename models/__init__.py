"""Estimators, and the classification of new networks."""

from typing import TYPE_CHECKING

from vramcast.dataset_builder.defaults import CHECKPOINT
from vramcast.models._base import Estimator
from vramcast.models.answer import Answer, Bucket
from vramcast.models.example import Example, Simulated, Target
from vramcast.models.labels import Buckets

if TYPE_CHECKING:
    from vramcast.models.classify import Classifier


def load(name: str = CHECKPOINT) -> "Classifier":
    """The classifier of a checkpoint, by its released name or its directory: `load().classify(module, inputs)`."""
    from vramcast.models.classify import Classifier  # noqa: PLC0415 - imports torch, which who reads an answer can do without

    return Classifier(name)


__all__ = ["Answer", "Bucket", "Buckets", "Estimator", "Example", "Simulated", "Target", "load"]
