"""Estimators, and the classification of new networks."""

from models._base import Estimator
from models.example import Example, Simulated, Target
from models.labels import Buckets

__all__ = ["Buckets", "Estimator", "Example", "Simulated", "Target"]
