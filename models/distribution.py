"""Distributions of the memory that jobs use on their devices: every figure of an answer is read from one.

The likeliest bucket, the point estimate, the safe figure, the probability of running out and the verdict are functions
of one distribution, so they cannot contradict each other. A network's kind is in `estimators/mixture_distribution`,
because it needs torch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypedDict

import numpy as np
from numpy.typing import NDArray

from vramcast.models.buckets import Buckets
from vramcast.models.example import Example

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Distribution(ABC):
    """Distributions of the memory that n jobs use on their devices, in bytes; all arrays are [n].

    One job of 10 GiB on a device of 12 GiB, with errors of -1 to 3 GiB, which are equally likely:

    >>> import numpy as np
    >>> from vramcast.models.buckets import Buckets
    >>> gib = 2.0**30
    >>> errors = np.array([-1.0, 0.0, 1.0, 2.0, 3.0])
    >>> distribution = ErrorDistribution(
    ...     overhead_bytes=np.array([0.5 * gib]), capacity_bytes=np.array([12 * gib]),
    ...     out_of_distribution=np.array([False]),
    ...     estimate_bytes=np.array([10 * gib]), unit_bytes=np.array([gib]), scores=[errors],
    ... )
    >>> float(distribution.quantile_bytes(0.5)[0] / gib), float(distribution.quantile_bytes(0.8)[0] / gib)
    (11.0, 12.0)
    >>> distribution.on_device(0.8)  # it does not fit
    array([inf])
    >>> distribution.proba(Buckets(int(4 * gib), int(12 * gib))).round(2)  # the last class is "does not fit"
    array([[0. , 0. , 0.6, 0.4]])

    Known limits: jobs are independent of each other, so no distribution of their sum follows. Above the capacity there
    is only "does not fit": the need of such a job comes from its example without a memory limit.
    """

    overhead_bytes: Array
    """The memory outside each job's allocator, below which nothing is used."""
    capacity_bytes: Array
    out_of_distribution: Flags
    """True for jobs unlike those that the estimator was calibrated on."""
    calibrated: ClassVar[bool] = False
    """True if quantiles above the median bound jobs as often as they say, by the errors of measured jobs."""

    @abstractmethod
    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the probability that each of some jobs uses less than each of m amounts [m]."""

    @abstractmethod
    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the least amount that a job stays at or below with this probability; infinity if it has none."""

    def point_bytes(self) -> Array:
        """Return [n]: the point estimate, which is the median; infinity for jobs that do not fit."""
        return self.on_device(0.5)

    def on_device(self, level: float) -> Array:
        """Return [n]: a quantile; infinity for jobs that do not fit."""
        used = self.quantile_bytes(level)
        return np.where(used >= self.capacity_bytes, np.inf, used)

    def proba(self, buckets: Buckets, jobs: Sequence[int] | None = None) -> Array:
        """Return [jobs, classes]: the probability of each bucket, by default of all jobs; the last: "does not fit"."""
        chosen = self._chosen(jobs)
        below = self.below(buckets.edges_bytes, chosen)
        capacities = self.capacity_bytes[chosen]
        # Buckets may end at the capacity of a larger device: memory beyond a job's own capacity does not fit.
        for capacity in np.unique(capacities[capacities < buckets.edges_bytes[-1]]):
            smaller = np.flatnonzero(capacities == capacity)
            fits = self.below(np.array([capacity]), [chosen[index] for index in smaller])
            below[smaller] = np.minimum(below[smaller], fits)
        return classes_of(below)

    def _chosen(self, jobs: Sequence[int] | None) -> list[int]:
        return list(range(len(self.capacity_bytes)) if jobs is None else jobs)


def classes_of(below: Array) -> Array:
    """Return [n, classes] from the probabilities below the edges [n, classes]."""
    below[:, 0] = 0  # no memory use is negative
    return np.hstack([np.diff(below, axis=1), np.maximum(1 - below[:, -1:], 0)])


@dataclass(frozen=True, kw_only=True)
class ErrorDistribution(Distribution):
    """Estimates with the errors of calibration jobs, in units of what is uncertain in each job."""

    calibrated = True
    estimate_bytes: Array
    """On the device, with its overhead."""
    unit_bytes: Array
    scores: Sequence[Array]
    """[n]: the sorted, equally likely errors of each job, in units."""

    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the share of scores with which a job uses less."""
        shares = np.zeros((len(jobs), len(used_bytes)))
        for row, job in enumerate(jobs):
            points = (used_bytes - self.estimate_bytes[job]) / self.unit_bytes[job]
            share = np.searchsorted(self.scores[job], points, side="left") / len(self.scores[job])
            shares[row] = np.where(used_bytes > self.overhead_bytes[job], share, 0.0)
        return shares

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the estimate raised by the score of that rank."""
        scores = np.array([score_quantile(item, level) for item in self.scores], dtype=np.float64)
        return np.maximum(self.estimate_bytes + self.unit_bytes * scores, self.overhead_bytes)


@dataclass(frozen=True, kw_only=True)
class SplicedDistribution(Distribution):
    """The lower half of one distribution, and above its median the upper half of another.

    A network's tails are not to be trusted at a risk of 1 %, so the errors of calibration jobs replace the upper one.
    """

    calibrated = True
    lower: Distribution
    upper: Distribution

    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the lower distribution's probability up to the median, and at least one half above it."""
        chosen = list(jobs)
        lower = np.minimum(self.lower.below(used_bytes, chosen), 0.5)
        upper = np.maximum(self.upper.below(used_bytes, chosen), 0.5)
        return np.where(used_bytes <= self._median_bytes[chosen, None], lower, upper)

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the lower distribution's quantile, or above the median the upper one's."""
        if level <= 0.5:
            return self.lower.quantile_bytes(level)
        return np.maximum(self.upper.quantile_bytes(level), self._median_bytes)

    @cached_property
    def _median_bytes(self) -> Array:
        return self.lower.quantile_bytes(0.5)


@dataclass(frozen=True, kw_only=True)
class FigureDistribution(Distribution):
    """Equally likely figures for each job, with a point estimate of its own: the kind of baselines."""

    figures_bytes: Array
    """[n, k], or [1, k] if all jobs have the same; infinity where a job does not fit."""
    estimate_bytes: Array
    """Infinity for jobs that do not fit."""

    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the share of figures below each amount."""
        return np.asarray((self._of_jobs(jobs)[:, :, None] < used_bytes).mean(axis=1))

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: the figure of that rank."""
        figures = np.sort(self._of_jobs(self._chosen(None)), axis=1)
        return figures[:, _rank(figures.shape[1], level)]

    def point_bytes(self) -> Array:
        """Return [n]: the estimate, which need not be the median of the figures."""
        return self.estimate_bytes

    def proba(self, buckets: Buckets, jobs: Sequence[int] | None = None) -> Array:
        """Return [jobs, classes]: the share of figures in each bucket."""
        classes = buckets.of(self._of_jobs(self._chosen(jobs)))
        return np.stack([(classes == one).mean(axis=1) for one in range(buckets.classes)], axis=1)

    def _of_jobs(self, jobs: Sequence[int]) -> Array:
        return np.broadcast_to(self.figures_bytes, (len(self.capacity_bytes), self.figures_bytes.shape[1]))[list(jobs)]


def score_quantile(scores: Array, level: float) -> float:
    """Return the score of the rank that a new one stays at or below with this probability."""
    return float(scores[_rank(len(scores), level)])


def _rank(count: int, level: float) -> int:
    return min(max(math.ceil(count * level), 1), count) - 1


class Bounds(TypedDict):
    """The fields that distributions of all kinds share."""

    overhead_bytes: Array
    capacity_bytes: Array
    out_of_distribution: Flags


def bounds_of(examples: Sequence[Example], out_of_distribution: Flags | None = None) -> Bounds:
    """Return the fields that distributions of all kinds share, by default with no job out of distribution."""
    flags = np.zeros(len(examples), dtype=np.bool_) if out_of_distribution is None else out_of_distribution
    overheads, capacities = overheads_of(examples), capacities_of(examples)
    return Bounds(overhead_bytes=overheads, capacity_bytes=capacities, out_of_distribution=flags)


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
