"""Mixtures of logistic densities with an atom at infinity, which is the probability that a job fits no device.

The distribution function of a logistic has a closed form, so buckets of any width are differences of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows

Array = NDArray[np.float64]

LEAST_SCALE = 5e-4
"""Smallest scale of a component, in units of the logarithm: repeated measurements of one job differ by more."""
_MOST_LOG_SCALE = 2.0
_STEPS = 128
"""Twice the bisections that reach the precision from any bounds."""
_PRECISION = 1e-13


@dataclass(frozen=True)
class Mixture:
    """`components` logistics for each of n examples, and a weight for "fits no device"."""

    log_weights: Tensor  # [n, components + 1], the last is the atom's
    locations: Tensor  # [n, components]
    scales: Tensor  # [n, components]

    @classmethod
    def of_outputs(cls, outputs: Tensor, center: float, spread: float) -> Self:
        """Read a network's outputs [n, 3 * components + 1], which are in units of the labels' spread."""
        components = (outputs.shape[1] - 1) // 3
        weights, locations, log_scales = torch.split(outputs, [components + 1, components, components], dim=1)
        scales = spread * log_scales.clamp(max=_MOST_LOG_SCALE).exp() + LEAST_SCALE
        return cls(weights.log_softmax(1), center + spread * locations, scales)

    @staticmethod
    def outputs_of(components: int) -> int:
        """Return the number of a network's outputs for one example."""
        return 3 * components + 1

    @staticmethod
    def first_bias(components: int) -> Tensor:
        """Return initial biases of the last layer: wide components side by side, and a small atom."""
        weights = torch.cat([torch.zeros(components), torch.tensor([-2.0])])
        return torch.cat([weights, torch.linspace(-0.5, 0.5, components), torch.full((components,), -0.7)])

    def rows(self, chosen: list[int]) -> "Mixture":
        """Return the mixtures of some examples."""
        return Mixture(self.log_weights[chosen], self.locations[chosen], self.scales[chosen])

    def log_mass(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return [n]: the logarithm of the probability between two finite bounds [n], exact in the tails.

        sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)), which does not cancel.
        """
        a, b = self._standard(lower), self._standard(upper)
        width = (b - a).clamp(min=torch.finfo(a.dtype).tiny)
        masses = F.logsigmoid(b) + F.logsigmoid(-a) + torch.log(-torch.expm1(-width))
        return torch.logsumexp(self.log_weights[:, :-1] + masses, dim=1)

    def log_survival(self, bound: Tensor) -> Tensor:
        """Return [n]: the logarithm of the probability above a bound [n]."""
        finite = self.log_weights[:, :-1] + F.logsigmoid(-self._standard(bound))
        return torch.logsumexp(torch.cat([finite, self.log_weights[:, -1:]], dim=1), dim=1)

    def cdf(self, points: Tensor) -> Tensor:
        """Return [n, m]: the probability up to each of m points [n, m], which may be infinite."""
        standard = (points[:, :, None] - self.locations[:, None]) / self.scales[:, None]
        return (self.log_weights[:, None, :-1].exp() * torch.sigmoid(standard)).sum(-1)

    def quantile(self, level: float) -> Tensor:
        """Return [n]: the quantile at a level; infinity where the atom is larger than 1 - level."""
        finite = -torch.expm1(self.log_weights[:, -1])
        wanted = torch.where(finite > level, level / finite, torch.full_like(finite, 0.5))
        ends = self.locations + self.scales * torch.logit(wanted)[:, None]
        value = self._solve(wanted * finite, ends.min(1).values, ends.max(1).values)
        return torch.where(finite > level, value, torch.full_like(value, torch.inf))

    def _solve(self, levels: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return the points [n] where the distribution functions reach the levels [n], between two bounds."""
        weights = self.log_weights[:, :-1].exp()
        arrays = (item.numpy() for item in (weights, self.locations, self.scales, levels, low, high))
        return torch.from_numpy(_solved(*arrays))

    def given_finite(self) -> Self:
        """Return the mixture conditioned on a finite value."""
        weights = self.log_weights[:, :-1].log_softmax(1)
        never = torch.full_like(weights[:, :1], -torch.inf)
        return type(self)(torch.cat([weights, never], dim=1), self.locations, self.scales)

    def replaced(self, which: Tensor, other: Self) -> Self:
        """Replace the marked examples [n] by those of another mixture with as many components."""
        mine, theirs = ((item.log_weights, item.locations, item.scales) for item in (self, other))
        return type(self)(*(torch.where(which[:, None], b, a) for a, b in zip(mine, theirs, strict=True)))

    def shifted(self, by: Tensor) -> Self:
        """Shift each example by an amount [n]."""
        return type(self)(self.log_weights, self.locations + by[:, None], self.scales)

    def tempered(self, temperature: float) -> Self:
        """Widen every component by a factor."""
        return type(self)(self.log_weights, self.locations, self.scales * temperature)

    def double(self) -> Self:
        """Convert to 64 bits, for answers."""
        return type(self)(self.log_weights.double(), self.locations.double(), self.scales.double())

    def _standard(self, points: Tensor) -> Tensor:
        return (points[:, None] - self.locations) / self.scales


def _solved(weights: Array, locations: Array, scales: Array, levels: Array, low: Array, high: Array) -> Array:
    """Return the points [n] by Newton's steps; numpy starts an operation in a fifth of torch's time.

    A step is a bisection instead where Newton's leaves the bounds or does not halve the last one.
    """
    point, last = (low + high) / 2, high - low
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(_STEPS):
            halves = np.tanh((point[:, None] - locations) / (2 * scales))
            error = (weights * (1 + halves)).sum(1) / 2 - levels
            slope = (weights * (1 - halves * halves) / scales).sum(1) / 4
            low, high = np.where(error < 0, point, low), np.where(error < 0, high, point)
            newton = point - error / slope
            good = (newton >= low) & (newton <= high) & (np.abs(newton - point) < 0.5 * last)
            following = np.where(good, newton, (low + high) / 2)
            last = np.abs(following - point)
            point = following
            if (last <= _PRECISION * np.maximum(np.abs(point), 1)).all():
                break
    return point


def mixed(mixtures: Sequence[Mixture]) -> Mixture:
    """Return the equally weighted mixture of mixtures."""
    share = math.log(len(mixtures))
    finite = torch.cat([item.log_weights[:, :-1] for item in mixtures], dim=1) - share
    atom = torch.logsumexp(torch.stack([item.log_weights[:, -1] for item in mixtures]), dim=0) - share
    return Mixture(
        torch.cat([finite, atom[:, None]], dim=1),
        torch.cat([item.locations for item in mixtures], dim=1),
        torch.cat([item.scales for item in mixtures], dim=1),
    )


def stacked(mixtures: Sequence[Mixture]) -> Mixture:
    """Concatenate the mixtures of several sets of examples."""
    return Mixture(
        torch.cat([item.log_weights for item in mixtures]),
        torch.cat([item.locations for item in mixtures]),
        torch.cat([item.scales for item in mixtures]),
    )
