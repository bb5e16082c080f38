"""Estimators, and the classification of new networks."""

from models._base import Estimator
from models.answer import Answer, Bucket
from models.example import Example, Simulated, Target
from models.labels import Buckets

__all__ = ["Answer", "Bucket", "Buckets", "Estimator", "Example", "Simulated", "Target"]
