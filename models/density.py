"""Mixtures of logistic densities with an atom at infinity: how likely a job takes how much, and that it does not fit.

A logistic has its distribution function in closed form, so buckets of any width come from differences of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows

LEAST_SCALE = 5e-4
"""Of a component, in units of the logarithm: repeated measurements of one job differ by more."""
_MOST_LOG_SCALE = 2.0
_HALVINGS = 64


@dataclass(frozen=True)
class Mixture:
    """`components` logistics for each of n examples, and a weight for "more than any card"."""

    log_weights: Tensor  # [n, components + 1], the last is the atom's
    locations: Tensor  # [n, components]
    scales: Tensor  # [n, components]

    @classmethod
    def of_outputs(cls, outputs: Tensor, center: float, spread: float) -> Self:
        """From a network's outputs [n, 3 * components + 1], which are in units of the targets' spread."""
        components = (outputs.shape[1] - 1) // 3
        weights, locations, log_scales = torch.split(outputs, [components + 1, components, components], dim=1)
        scales = spread * log_scales.clamp(max=_MOST_LOG_SCALE).exp() + LEAST_SCALE
        return cls(weights.log_softmax(1), center + spread * locations, scales)

    @staticmethod
    def outputs_of(components: int) -> int:
        """How many numbers a network says for one example."""
        return 3 * components + 1

    @staticmethod
    def first_bias(components: int) -> Tensor:
        """Biases of a network's last layer: components side by side, rather wide, and most jobs fit."""
        weights = torch.cat([torch.zeros(components), torch.tensor([-2.0])])
        return torch.cat([weights, torch.linspace(-0.5, 0.5, components), torch.full((components,), -0.7)])

    def rows(self, chosen: slice) -> "Mixture":
        """Of some of the examples."""
        return Mixture(self.log_weights[chosen], self.locations[chosen], self.scales[chosen])

    def log_mass(self, lower: Tensor, upper: Tensor) -> Tensor:
        """[n]: the logarithm of the probability between two finite bounds [n], exact far out in the tails.

        sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)), in which nothing cancels.
        """
        a, b = self._standard(lower), self._standard(upper)
        width = (b - a).clamp(min=torch.finfo(a.dtype).tiny)
        masses = F.logsigmoid(b) + F.logsigmoid(-a) + torch.log(-torch.expm1(-width))
        return torch.logsumexp(self.log_weights[:, :-1] + masses, dim=1)

    def log_survival(self, bound: Tensor) -> Tensor:
        """[n]: the logarithm of the probability of more than a bound [n]."""
        finite = self.log_weights[:, :-1] + F.logsigmoid(-self._standard(bound))
        return torch.logsumexp(torch.cat([finite, self.log_weights[:, -1:]], dim=1), dim=1)

    def cdf(self, points: Tensor) -> Tensor:
        """[n, m]: the probability of at most each of m points [n, m]; infinities are points too."""
        standard = (points[:, :, None] - self.locations[:, None]) / self.scales[:, None]
        return (self.log_weights[:, None, :-1].exp() * torch.sigmoid(standard)).sum(-1)

    def quantile(self, level: float) -> Tensor:
        """[n]: what is exceeded with probability 1 - level; infinity where the atom takes more than that."""
        finite = -torch.expm1(self.log_weights[:, -1])
        wanted = torch.where(finite > level, level / finite, torch.full_like(finite, 0.5))
        ends = self.locations + self.scales * torch.logit(wanted)[:, None]
        found = self._bisect(wanted * finite, ends.min(1).values, ends.max(1).values)
        return torch.where(finite > level, found, torch.full_like(found, torch.inf))

    def _bisect(self, levels: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Between the components' quantiles, where the mixture's must lie."""
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = self.cdf(middle[:, None])[:, 0] < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def given_finite(self) -> Self:
        """The mixture under the condition that the atom did not come up."""
        weights = self.log_weights[:, :-1].log_softmax(1)
        never = torch.full_like(weights[:, :1], -torch.inf)
        return type(self)(torch.cat([weights, never], dim=1), self.locations, self.scales)

    def replaced(self, which: Tensor, other: Self) -> Self:
        """Those marked [n] as another mixture of as many components has them."""
        mine, theirs = ((item.log_weights, item.locations, item.scales) for item in (self, other))
        return type(self)(*(torch.where(which[:, None], b, a) for a, b in zip(mine, theirs, strict=True)))

    def shifted(self, by: Tensor) -> Self:
        """Moved by an amount [n] for each example."""
        return type(self)(self.log_weights, self.locations + by[:, None], self.scales)

    def tempered(self, temperature: float) -> Self:
        """Every component wider by a factor."""
        return type(self)(self.log_weights, self.locations, self.scales * temperature)

    def double(self) -> Self:
        """In 64 bits, for answers."""
        return type(self)(self.log_weights.double(), self.locations.double(), self.scales.double())

    def _standard(self, points: Tensor) -> Tensor:
        return (points[:, None] - self.locations) / self.scales


def mixed(mixtures: Sequence[Mixture]) -> Mixture:
    """The mixture of mixtures, each of the same weight: again one of logistics."""
    share = math.log(len(mixtures))
    finite = torch.cat([item.log_weights[:, :-1] for item in mixtures], dim=1) - share
    atom = torch.logsumexp(torch.stack([item.log_weights[:, -1] for item in mixtures]), dim=0) - share
    return Mixture(
        torch.cat([finite, atom[:, None]], dim=1),
        torch.cat([item.locations for item in mixtures], dim=1),
        torch.cat([item.scales for item in mixtures], dim=1),
    )


def stacked(mixtures: Sequence[Mixture]) -> Mixture:
    """The mixtures of several sets of examples, one set below the other."""
    return Mixture(
        torch.cat([item.log_weights for item in mixtures]),
        torch.cat([item.locations for item in mixtures]),
        torch.cat([item.scales for item in mixtures]),
    )
