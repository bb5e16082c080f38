"""Outlooks: the distribution of a job's memory that every figure of an answer is read from.

The likeliest bucket, the point estimate, the safe figure, the probability of running out and the verdict are functions
of one distribution, so they cannot contradict each other.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets
from vramcast.models.example import Example

Array = NDArray[np.float64]


class Outlook(ABC):
    """Distributions of the memory that n jobs use on their devices."""

    capacity_bytes: Array
    """[n]"""

    @abstractmethod
    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the probability that each of some jobs uses less than each of m amounts [m]."""

    @abstractmethod
    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the least amount that a job stays at or below with this probability; infinity if it has none."""

    def proba(self, buckets: Buckets, jobs: Sequence[int] | None = None) -> Array:
        """Return [jobs, classes]: the probability of each bucket, by default of all jobs; the last: "does not fit"."""
        chosen = list(range(len(self.capacity_bytes)) if jobs is None else jobs)
        below = self.below(buckets.edges_bytes, chosen)
        below[:, 0] = 0  # no memory use is negative
        capacities = self.capacity_bytes[chosen]
        # Buckets may end at the capacity of a larger device: what exceeds a job's own one does not fit.
        for capacity in np.unique(capacities[capacities < buckets.edges_bytes[-1]]):
            smaller = np.flatnonzero(capacities == capacity)
            fits = self.below(np.array([capacity]), [chosen[index] for index in smaller])
            below[smaller] = np.minimum(below[smaller], fits)
        return np.hstack([np.diff(below, axis=1), np.maximum(1 - below[:, -1:], 0)])

    def on_device(self, level: float) -> Array:
        """Return [n]: a quantile; infinity for jobs that do not fit."""
        used = self.quantile_bytes(level)
        return np.where(used >= self.capacity_bytes, np.inf, used)


@dataclass(frozen=True)
class ScoredOutlook(Outlook):
    """Estimates with the errors that jobs of the same stratum showed, in units of what is uncertain in each job.

    Each of the `k` scores of a stratum has the probability 1 / (k + 1), as in conformal prediction. The rest lies at
    twice the largest score, because rows say nothing about what is rarer than they are.
    """

    estimate_bytes: Array
    """[n]: on the device, with its overhead."""
    unit_bytes: Array
    """[n]"""
    scores: Sequence[Array]
    """[n]: the sorted scores of each job's stratum."""
    floor_bytes: Array
    """[n]: the overhead of the device, below which nothing is used."""
    capacity_bytes: Array

    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the share of scores with which a job uses less."""
        shares = np.zeros((len(jobs), len(used_bytes)))
        for row, job in enumerate(jobs):
            points = (used_bytes - self.estimate_bytes[job]) / self.unit_bytes[job]
            shares[row] = np.where(used_bytes > self.floor_bytes[job], share_below(points, self.scores[job]), 0.0)
        return shares

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the estimate raised by the score of that rank."""
        scores = np.array([score_quantile(item, level) for item in self.scores], dtype=np.float64)
        return np.maximum(self.estimate_bytes + self.unit_bytes * scores, self.floor_bytes)


def share_below(points: Array, scores: Array) -> Array:
    """Return [m]: the share of the scores and of the tail's score that is below each point."""
    return (np.searchsorted(scores, points, side="left") + (points > _tail(scores))) / (len(scores) + 1)


def score_quantile(scores: Array, level: float) -> float:
    """Return the score of the rank that a new one stays at or below with this probability."""
    rank = math.ceil((len(scores) + 1) * level)
    return float(scores[max(rank, 1) - 1]) if rank <= len(scores) else _tail(scores)


def _tail(scores: Array) -> float:
    """Return the score of what is rarer than the rows: twice the largest one."""
    return float(max(2 * scores[-1], scores[-1]))


def capacities_of(examples: Sequence[Example]) -> Array:
    """Return [n]: the memory of each example's device."""
    return np.array([example.capacity_bytes for example in examples], dtype=np.float64)


def overheads_of(examples: Sequence[Example]) -> Array:
    """Return [n]: the memory outside each example's allocator."""
    return np.array([example.overhead_bytes for example in examples], dtype=np.float64)


def own_bytes_of(examples: Sequence[Example], estimated_bytes: Array | None = None) -> Array:
    """Return [n]: the measured memory of each job's allocator, up to the capacity for jobs that did not fit.

    Of a label that is a band, return the value nearest to an estimate, or else the upper end.
    """
    labels = [(example, example.measured) for example in examples]
    used = np.array(
        [label.used_bytes if label.fits else item.capacity_bytes for item, label in labels], dtype=np.float64
    )
    overheads = overheads_of(examples)
    if estimated_bytes is not None:
        least = [label.least_used_bytes for _, label in labels]
        lower = np.where([item is None for item in least], used, [float(item or 0) for item in least])
        used = np.clip(estimated_bytes + overheads, np.minimum(lower, used), used)
    return np.maximum(used - overheads, 0)
