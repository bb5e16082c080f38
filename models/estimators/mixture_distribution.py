"""The distribution of a network: a mixture of logistics over the logarithm of a job's memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vramcast.models.buckets import Buckets
from vramcast.models.distribution import Distribution, bounds_of, classes_of
from vramcast.models.estimators.density import Mixture, mixed, stacked
from vramcast.models.example import Example

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MixtureDistribution(Distribution):
    """Mixtures over log(used - overhead), in bytes."""

    mixture: Mixture

    @classmethod
    def of_gaps(cls, gaps: Mixture, reference_bytes: Sequence[float], examples: Sequence[Example]) -> Self:
        """Return the distributions of memory from those of the gap to a reference."""
        reference = torch.tensor(reference_bytes, dtype=torch.float64).clamp(min=1).log()
        return cls(**bounds_of(examples), mixture=gaps.double().shifted(reference))

    @classmethod
    def mixed(cls, distributions: Sequence["MixtureDistribution"]) -> "MixtureDistribution":
        """Return the average of several distributions of the same jobs."""
        return replace(distributions[0], mixture=mixed([item.mixture for item in distributions]))

    @classmethod
    def stacked(cls, distributions: Sequence["MixtureDistribution"]) -> "MixtureDistribution":
        """Concatenate the distributions of several sets of jobs."""
        return cls(
            overhead_bytes=np.concatenate([item.overhead_bytes for item in distributions]),
            capacity_bytes=np.concatenate([item.capacity_bytes for item in distributions]),
            out_of_distribution=np.concatenate([item.out_of_distribution for item in distributions]),
            mixture=stacked([item.mixture for item in distributions]),
        )

    def tempered(self, temperature: float) -> "MixtureDistribution":
        """Widen the distributions by a factor."""
        return replace(self, mixture=self.mixture.tempered(temperature))

    def recentred(self, own_bytes: Array, scales: Array) -> "MixtureDistribution":
        """Replace those of jobs out of distribution by one logistic around another figure.

        `own_bytes` [n] is the memory of the job's allocator, without the device's overhead; `scales` [n] are widths.
        """
        finite = self.mixture.given_finite()
        middle = torch.from_numpy(own_bytes).clamp(min=1).log()[:, None]
        around = Mixture(
            finite.log_weights,
            middle.expand_as(finite.locations),
            torch.as_tensor(scales)[:, None].expand_as(finite.scales),
        )
        return replace(self, mixture=self.mixture.replaced(torch.from_numpy(self.out_of_distribution), around))

    def below(self, used_bytes: Array, jobs: Sequence[int]) -> Array:
        """Return [jobs, m]: the probability that each job uses less than each of m amounts [m]."""
        overheads = torch.from_numpy(self.overhead_bytes[list(jobs)])
        amounts = torch.from_numpy(used_bytes).expand(len(jobs), -1)
        return np.asarray(self.mixture.rows(list(jobs)).cdf(_log_own(amounts, overheads)).numpy())

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: a quantile, which may exceed the capacity; infinity if the atom is larger than 1 - level."""
        return self.own_quantile_bytes(level) + self.overhead_bytes

    def own_quantile_bytes(self, level: float) -> Array:
        """Return [n]: a quantile of the memory of the job's allocator."""
        return self._own_medians if level == 0.5 else self._own_quantiles(level)

    @cached_property
    def _own_medians(self) -> Array:
        return self._own_quantiles(0.5)

    def _own_quantiles(self, level: float) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(self.mixture.quantile(level).numpy()))

    def proba(self, buckets: Buckets, jobs: Sequence[int] | None = None) -> Array:
        """Return [jobs, classes]: the probability of each bucket; the last begins where the buckets end.

        A network has the classes of the largest device: a job on a smaller one may have mass above its own capacity.
        """
        return classes_of(self.below(buckets.edges_bytes, self._chosen(jobs)))

    def log_likelihood(self, lower_bytes: ArrayLike, upper_bytes: ArrayLike, fits: NDArray[np.bool_]) -> Array:
        """Return [n]: the log likelihood of an interval, or above its lower bound for jobs that did not fit."""
        overheads = torch.from_numpy(self.overhead_bytes)
        lower, upper = (
            _log_own(torch.as_tensor(np.asarray(item, dtype=np.float64))[:, None], overheads)[:, 0]
            for item in (lower_bytes, upper_bytes)
        )
        inside, above = self.mixture.log_mass(lower, upper), self.mixture.log_survival(lower)
        return np.asarray(torch.where(torch.from_numpy(fits), inside, above).numpy())


def _log_own(used_bytes: Tensor, overhead_bytes: Tensor) -> Tensor:
    """Convert bytes on the device [n, m] to logarithms of the memory of the job's allocator."""
    return (used_bytes - overhead_bytes[:, None]).clamp(min=1).log()
