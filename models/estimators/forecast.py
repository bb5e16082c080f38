"""Forecasts: a distribution of the memory on the device for each job, with its quantiles and buckets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vramcast.models.buckets import Buckets
from vramcast.models.estimators.density import Mixture, mixed, stacked
from vramcast.models.example import Example

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """Distributions of log(used - overhead), in bytes, for n jobs on their devices."""

    mixture: Mixture
    overhead_bytes: Tensor  # [n], 64 bits
    capacity_bytes: Tensor  # [n]

    @classmethod
    def of_gaps(cls, gaps: Mixture, reference_bytes: Sequence[float], examples: Sequence[Example]) -> Self:
        """Return the forecast of distributions of the gap to a reference."""
        reference = torch.tensor(reference_bytes, dtype=torch.float64).clamp(min=1).log()
        overhead, capacity = bounds_of(examples)
        return cls(gaps.double().shifted(reference), overhead, capacity)

    @classmethod
    def mixed(cls, forecasts: Sequence["Forecast"]) -> "Forecast":
        """Return the average of several forecasts of the same jobs."""
        return replace(forecasts[0], mixture=mixed([item.mixture for item in forecasts]))

    @classmethod
    def stacked(cls, forecasts: Sequence["Forecast"]) -> "Forecast":
        """Concatenate the forecasts of several sets of jobs."""
        overheads, capacities = (
            [getattr(item, name) for item in forecasts] for name in ("overhead_bytes", "capacity_bytes")
        )
        return cls(stacked([item.mixture for item in forecasts]), torch.cat(overheads), torch.cat(capacities))

    def tempered(self, temperature: float) -> "Forecast":
        """Widen the distributions by a factor."""
        return replace(self, mixture=self.mixture.tempered(temperature))

    def recentred(self, which: NDArray[np.bool_], used_bytes: Sequence[float], scales: Array) -> "Forecast":
        """Replace the marked forecasts by a logistic distribution centred on another figure.

        `used_bytes` [n] is the memory of the job's allocator, without the device's overhead; `scales` [n] are widths.
        """
        finite = self.mixture.given_finite()
        middle = torch.tensor(used_bytes, dtype=torch.float64).clamp(min=1).log()[:, None]
        around = Mixture(
            finite.log_weights,
            middle.expand_as(finite.locations),
            torch.as_tensor(scales)[:, None].expand_as(finite.scales),
        )
        return replace(self, mixture=self.mixture.replaced(torch.from_numpy(which), around))

    def proba(self, buckets: Buckets) -> Array:
        """Return [n, classes]: the probability of each bucket; the last is "does not fit"."""
        below = torch.from_numpy(self.below(buckets.edges_bytes))
        below[:, 0] = 0  # no memory use is negative
        last = (1 - below[:, -1:]).clamp(min=0)  # weights may sum to slightly more than one
        proba: Array = torch.cat([below.diff(dim=1), last], dim=1).numpy()
        return proba

    def below(self, used_bytes: Array) -> Array:
        """Return [n, m]: the probability that each job uses less than each of m amounts [m]."""
        amounts = torch.from_numpy(used_bytes).expand(len(self.overhead_bytes), -1)
        return np.asarray(self.mixture.cdf(self._log_used(amounts)).numpy())

    def one(self, index: int) -> "Forecast":
        """Return the forecast of a single job."""
        chosen = slice(index, index + 1)
        return Forecast(self.mixture.rows(chosen), self.overhead_bytes[chosen], self.capacity_bytes[chosen])

    def quantile_bytes(self, level: float) -> Array:
        """Return [n]: a quantile of the memory on the device; infinity for jobs that do not fit."""
        return self.on_device(self.own_quantile_bytes(level))

    def median_bytes(self) -> Array:
        """Return [n]: the point estimate; infinity for jobs that do not fit."""
        return self.quantile_bytes(0.5)

    def own_quantile_bytes(self, level: float) -> Array:
        """Return [n]: a quantile of the memory of the job's allocator, which may exceed the capacity."""
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(self.mixture.quantile(level).numpy()))

    def on_device(self, own_bytes: Array) -> Array:
        """Return [n]: the use of the device for a size of the job's allocator; infinity if it does not fit."""
        used = own_bytes + self.overhead_bytes.numpy()
        return np.where(used >= self.capacity_bytes.numpy(), np.inf, used)

    def log_likelihood(self, lower_bytes: ArrayLike, upper_bytes: ArrayLike, fits: NDArray[np.bool_]) -> Array:
        """Return [n]: the log likelihood of an interval, or above its lower bound for jobs that did not fit."""
        lower, upper = (
            self._log_used(torch.as_tensor(np.asarray(item, dtype=np.float64))[:, None])[:, 0]
            for item in (lower_bytes, upper_bytes)
        )
        inside, above = self.mixture.log_mass(lower, upper), self.mixture.log_survival(lower)
        return np.asarray(torch.where(torch.from_numpy(fits), inside, above).numpy())

    def _log_used(self, used_bytes: Tensor) -> Tensor:
        """Convert bytes on the device [n, m] to logarithms of the memory of the job's allocator."""
        return (used_bytes - self.overhead_bytes[:, None]).clamp(min=1).log()


def bounds_of(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return overheads and capacities [n]."""
    overhead = torch.tensor([example.overhead_bytes for example in examples], dtype=torch.float64)
    capacity = torch.tensor([example.capacity_bytes for example in examples], dtype=torch.float64)
    return overhead, capacity
